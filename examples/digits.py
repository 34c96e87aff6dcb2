# SPDX-License-Identifier: Apache-2.0
"""Digits to learn from, without a download: drawn from seven segments, moved about, with noise.

load_digits() has the shape of the MNIST loaders: ((images, labels), (images, labels)), images of
28 x 28 floats between 0 and 1. Every process draws the same ones.
"""
import numpy as np

# Segments of each digit: a top, b, c right, d bottom, e, f left, g middle.
_SEGMENTS = ["abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg",
             "abcdfg"]
_PLACES = {  # rows, columns
    "a": (slice(2, 4), slice(4, 12)), "b": (slice(2, 10), slice(10, 12)),
    "c": (slice(9, 18), slice(10, 12)), "d": (slice(16, 18), slice(4, 12)),
    "e": (slice(9, 18), slice(4, 6)), "f": (slice(2, 10), slice(4, 6)),
    "g": (slice(9, 11), slice(4, 12)),
}


def _shape_of(digit):
    shape = np.zeros((20, 16), dtype="float32")
    for segment in _SEGMENTS[digit]:
        shape[_PLACES[segment]] = 1.0
    return shape


def _draw(count, random):
    shapes = [_shape_of(digit) for digit in range(10)]
    labels = random.randint(0, 10, count)
    images = random.rand(count, 28, 28).astype("float32") * 0.4
    for image, label in zip(images, labels):
        top, left = random.randint(0, 9), random.randint(0, 13)
        image[top:top + 20, left:left + 16] += shapes[label] * random.uniform(0.4, 0.6)
    return np.clip(images, 0.0, 1.0), labels.astype("int64")


def load_digits(train=4096, test=512, seed=7):
    random = np.random.RandomState(seed)
    return _draw(train, random), _draw(test, random)
