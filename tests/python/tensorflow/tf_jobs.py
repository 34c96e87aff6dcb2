# SPDX-License-Identifier: Apache-2.0
"""What the TensorFlow tests share: starting ranks that are quiet and use one thread each."""
from ranks import run_ranks

# One thread for operations: a kernel that waited in it would stop its rank for good.
ENVIRONMENT = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def run_tf(size, module, function, *args, env=None, codes=None):
    """run_ranks() for a module of this folder; TensorFlow takes its time to be imported."""
    return run_ranks(size, f"tensorflow/{module}", function, *args, codes=codes,
                     env={**ENVIRONMENT, **(env or {})}, timeout_s=900)
