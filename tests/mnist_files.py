"""Writes what ringcomm.data.mnist() reads: small files in MNIST's format."""

import gzip
import struct

import numpy as np

TYPES = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}


def packed(array):
    code = TYPES[array.dtype.str[1:]]
    header = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write_mnist(folder, *, is_zipped=False, n=5):
    pack = gzip.compress if is_zipped else bytes
    end = ".gz" if is_zipped else ""
    arrays = {}
    for part, count in (("train", n), ("t10k", 3)):
        images = np.arange(count * 28 * 28).reshape(count, 28, 28).astype(np.uint8)
        labels = np.arange(count).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte{end}").write_bytes(pack(packed(images)))
        (folder / f"{part}-labels-idx1-ubyte{end}").write_bytes(pack(packed(labels)))
        arrays[part] = images, labels
    return arrays
