# SPDX-License-Identifier: Apache-2.0
"""What saving and loading need of a framework: NumPy here, the base of the others.

is_tensor(value), describe(tensor) -> (dtype, shape), copy(tensor, begin, end, memory): bytes of it,
make(dtype, shape) -> (tensor, its memory), and for objects that hold tensors state_of(value), None
for others, and restore(value, state).
"""
import numpy as np

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U64": "uint64", "U32": "uint32", "U16": "uint16",
          "U8": "uint8", "BOOL": "bool", "C64": "complex64", "C128": "complex128"}
_CODES = {name: code for code, name in DTYPES.items()}
# Types that NumPy has only with ml_dtypes, which TensorFlow and JAX bring.
_ML_DTYPES = {"BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_CODES.update({name: code for code, name in _ML_DTYPES.items()})


def dtype_of(code):
    """The NumPy dtype of a code of the file format."""
    if code in _ML_DTYPES:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, _ML_DTYPES[code]))
    return np.dtype(DTYPES[code])


class NumpyFramework:
    """Arrays, and objects with state_dict() and load_state_dict()."""

    def is_tensor(self, value):
        return isinstance(value, np.ndarray) and value.dtype.name in _CODES

    def _array(self, tensor):
        return tensor

    def describe(self, tensor):
        array = self._array(tensor)
        return _CODES[array.dtype.name], tuple(array.shape)

    def copy(self, tensor, begin, end, memory):
        flat = np.ascontiguousarray(self._array(tensor)).reshape(-1).view(np.uint8)
        np.frombuffer(memory, dtype=np.uint8)[:] = flat[begin:end]

    def make(self, dtype, shape):
        array = np.empty(shape, dtype=dtype_of(dtype))
        return array, memoryview(array.reshape(-1).view(np.uint8))

    def state_of(self, value):
        return value.state_dict() if hasattr(value, "state_dict") \
            and hasattr(value, "load_state_dict") else None

    def restore(self, value, state):
        value.load_state_dict(state)
