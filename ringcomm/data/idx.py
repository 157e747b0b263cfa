"""Reads IDX files, the format of MNIST: http://yann.lecun.com/exdb/mnist."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Arrays = tuple[NDArray[Any], NDArray[Any]]
_GZIP: Final = b"\x1f\x8b"
_TYPES: Final = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_IMAGES, _LABELS = 2051, 2049
_MOST_DIMENSIONS = 32


def read_idx(path: str | Path) -> NDArray[Any]:
    """Return the array of an IDX file, plain or gzipped, in native byte order.

    Raises:
        FileNotFoundError: neither `path` nor `path`.gz exists.
        ValueError: the file is not an IDX file, or is cut short; the text says what is wrong.
    """
    return _array(*_read(Path(path)))


def mnist(folder: str | Path) -> tuple[Arrays, Arrays]:
    """Return (images, labels) of the training set and of the test set, for data in MNIST's format.

    Args:
        folder: folder with train-images-idx3-ubyte, train-labels-idx1-ubyte and the two t10k-
            files, each plain or .gz.

    Returns:
        Images: uint8, shape (n, rows, columns). Labels: uint8, shape (n,).

    Raises:
        FileNotFoundError: a file is missing; the text says which.
        ValueError: a file is broken, or the numbers of images and labels differ.
    """
    return _pair(Path(folder), "train"), _pair(Path(folder), "t10k")


def _pair(folder: Path, part: str) -> Arrays:
    images = _of_kind(folder / f"{part}-images-idx3-ubyte", _IMAGES)
    labels = _of_kind(folder / f"{part}-labels-idx1-ubyte", _LABELS)
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {part} has {len(images)} images and {len(labels)} labels")
    return images, labels


def _of_kind(path: Path, magic: int) -> NDArray[Any]:
    content, source = _read(path)
    found = int.from_bytes(content[:4], "big")
    if found != magic:
        what = {_IMAGES: "images", _LABELS: "labels"}
        raise ValueError(
            f"{source}: begins with {found}, but a file of {what[magic]} with {magic}. Is it "
            f"{what.get(found, 'another kind of file')}?"
        )
    return _array(content, source)


def _read(path: Path) -> tuple[bytes, Path]:
    """Return the content of `path` or `path`.gz, unpacked, and the path of the file."""
    source = path if path.exists() else path.with_name(path.name + ".gz")
    if not source.exists():
        raise FileNotFoundError(f"neither {path} nor {source} exists")
    content = source.read_bytes()
    if content[:2] == _GZIP:
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{source}: is broken as a gzip file: {error}") from error
    return content, source


def _array(content: bytes, source: Path) -> NDArray[Any]:
    zeros, code, n_dimensions = content[:2], content[2:3], content[3:4]
    if zeros != b"\0\0" or not n_dimensions or code[0] not in _TYPES:
        raise ValueError(f"{source}: begins with {content[:4]!r}, which no IDX file does")
    start = 4 + 4 * n_dimensions[0]
    if n_dimensions[0] > _MOST_DIMENSIONS or len(content) < start:
        raise ValueError(f"{source}: is cut short in its header: {len(content)} bytes")
    shape = struct.unpack_from(f">{n_dimensions[0]}I", content, 4)
    dtype = np.dtype(_TYPES[code[0]])
    wanted = start + dtype.itemsize * int(np.prod(shape, dtype=object))
    if len(content) != wanted:
        raise ValueError(
            f"{source}: its header is for {' x '.join(map(str, shape))}, {wanted} bytes, but it "
            f"has {len(content)}"
        )
    array = np.frombuffer(content, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))
