# SPDX-License-Identifier: Apache-2.0
"""The helper of gradient_aggregation for eager execution, where programs import it from."""
from horovod.tensorflow.gradient_aggregation import (  # noqa: F401 - exported
    LocalGradientAggregationHelperEager)
