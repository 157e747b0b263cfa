"""IDX files, and MNIST's four of them."""

import gzip

import numpy as np
import pytest
from mnist_files import TYPES, packed, write_mnist

from ringcomm.data import mnist, read_idx


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0, 4), (2, 1, 3, 2), ()])
def test_what_was_written_is_read(kind, shape, tmp_path):
    array = (np.arange(np.prod(shape, dtype=int)) * 7).reshape(shape).astype(kind)
    (tmp_path / "a").write_bytes(packed(array))
    got = read_idx(tmp_path / "a")
    assert got.dtype == array.dtype
    assert np.array_equal(got, array)
    assert got.flags.writeable


@pytest.mark.parametrize("is_zipped", [True, False])
def test_mnist_is_its_four_files(is_zipped, tmp_path):
    arrays = write_mnist(tmp_path, is_zipped=is_zipped)
    for got, want in zip(mnist(tmp_path), arrays.values(), strict=True):
        assert all(map(np.array_equal, got, want))


def test_the_magic_numbers_are_those_of_mnist(tmp_path):
    write_mnist(tmp_path)
    for name, magic in (("images-idx3", 2051), ("labels-idx1", 2049)):
        content = (tmp_path / f"train-{name}-ubyte").read_bytes()
        assert int.from_bytes(content[:4], "big") == magic


def test_a_missing_file_is_named_in_both_forms(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither .*t10k-labels-idx1-ubyte nor .*\.gz"):
        mnist(tmp_path)


def cut(content):
    return content[:-1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (cut, "header is for 5 x 28 x 28, 3936 bytes, but it has 3935"),
        (lambda content: content + b"x", "3936 bytes, but it has 3937"),
        (lambda content: content[:10], "cut short in its header: 10 bytes"),
        (lambda _: b"", "begins with 0, but a file of images with 2051"),
        (lambda _: b"<html>", "begins with 1013478509, but a file of images with 2051"),
        (lambda _: packed(np.zeros(5, np.uint8)), r"begins with 2049.*Is it labels\?"),
        (lambda content: gzip.compress(content)[:-20], "broken as a gzip file"),
    ],
)
def test_a_broken_file_says_what_it_has(change, message, tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=message):
        mnist(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0\0", b"\0\0\x08", b"\0\0\x07\x01", b"\1\0\x08\x01"])
def test_what_is_no_idx_file_is_refused(content, tmp_path):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ValueError, match="which no IDX file does"):
        read_idx(tmp_path / "a")


def test_other_numbers_of_images_and_labels_are_refused(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(packed(np.zeros(4, np.uint8)))
    with pytest.raises(ValueError, match="5 images and 4 labels"):
        mnist(tmp_path)
