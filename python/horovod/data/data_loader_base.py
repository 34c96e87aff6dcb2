# SPDX-License-Identifier: Apache-2.0
"""The loaders of horovod.data, where programs import them from."""
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader  # noqa: F401 - exported
