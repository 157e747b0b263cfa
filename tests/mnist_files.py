"""Writes small files in MNIST's format, which an example reads."""

import gzip
import struct

import numpy as np


def packed(array):
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return header + array.tobytes()


def write_zipped_mnist(folder, n):
    for part, count in (("train", n), ("t10k", 3)):
        images = np.arange(count * 28 * 28).reshape(count, 28, 28).astype(np.uint8)
        labels = np.arange(count).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = folder / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(packed(array)))
