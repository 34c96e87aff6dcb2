# SPDX-License-Identifier: Apache-2.0
"""Calls a gradient hook TIMES times, so that test_cost.py can count its instructions.

    cost_hook.py TIMES BYTES

Parameters need no PyTorch for that: the hook asks a tensor for its type, layout, address and shape.
One rank alone; the result of every gradient is awaited before the next one.
"""
import array
import sys

from horovod import _core
from horovod.common import basics

STRIDED, FLOAT = object(), object()


class Tensor:
    dtype, layout, is_cpu, requires_grad = FLOAT, STRIDED, True, False

    def __init__(self, n_bytes):
        self.memory = array.array("f", [1.0] * (n_bytes // 4))
        self.shape = (len(self.memory),)
        self.address = self.memory.buffer_info()[0]

    def data_ptr(self):
        return self.address

    def is_contiguous(self):
        return True


class Parameter:
    def __init__(self, n_bytes):
        self.grad = Tensor(n_bytes)


def main():
    basics.init()
    hook = _core.GradientHook(
        parameter="weight", torch_dtype=FLOAT, strided=STRIDED, slow=None, always_slow=False,
        passes=1, name="allreduce.weight", dtype=_core.FLOAT32, reduce=_core.SUM, process_set=0,
        prescale=1.0, postscale=1.0)
    parameter = Parameter(int(sys.argv[2]))
    for _ in range(int(sys.argv[1])):
        hook(parameter)
        hook.handle.wait()
        hook.handle = None
        hook.left = 1
    basics.shutdown()


if __name__ == "__main__":
    main()
