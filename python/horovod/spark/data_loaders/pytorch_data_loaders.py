# SPDX-License-Identifier: Apache-2.0
"""The loaders of horovod.spark.data_loaders, where programs import them from."""
from horovod.spark.data_loaders import (  # noqa: F401 - exported
    PetastormBatchedDataLoader, PytorchAsyncDataLoader, PytorchDataLoader,
    PytorchInfiniteAsyncDataLoader, PytorchInfiniteDataLoader, PytorchInmemAsyncDataLoader,
    PytorchInmemDataLoader)
