# SPDX-License-Identifier: Apache-2.0
"""keras_mnist_advanced.py for machines without GPUs: every rank takes its share of the cores.

    horovodrun -np 2 python examples/keras/keras_mnist_advanced_modified.py --epochs 4

Images made by Dockerfile.spark have it among the examples of Spark, too.
"""
import os
import pathlib
import runpy

# Ranks that each start a thread for every core slow each other down; ranks without a GPU need not
# look for one. Both must be said before TensorFlow is loaded.
ranks_here = int(os.environ.get("HOROVOD_LOCAL_SIZE")
                 or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or 1)
threads = max(1, len(os.sched_getaffinity(0)) // ranks_here)
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("OMP_NUM_THREADS", str(threads))
os.environ.setdefault("TF_NUM_INTRAOP_THREADS", str(threads))
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "1")

# Beside this file; or, where only this file was copied, among the examples of the image.
folders = [pathlib.Path(__file__).resolve().parent, pathlib.Path("/horovod/examples/keras")]
examples = [folder / "keras_mnist_advanced.py" for folder in folders]
example = next((path for path in examples if path.exists()), None)
if example is None:
    raise SystemExit(f"{examples[0]} is not there: copy it and {folders[0].parent}/digits.py, too")
runpy.run_path(str(example), run_name="__main__")
