"""Codecs: what is refused, and that nothing is written where it is."""

import struct

import numpy as np
import pytest

from ringcomm import _core, codec
from ringcomm.arrays.dtypes import DTYPES as CODES
from ringcomm.codec import BF16, FP16, CodecError, Identity, Int8, TopK

CODECS = [Identity(), FP16(), BF16(), Int8(), Int8(block=7), TopK(0.01), TopK(1.0)]
DTYPES = ["float16", "float32", "float64"]


def values(count, dtype="float32"):
    return np.random.default_rng(1).standard_normal(count).astype(dtype)


class TestMalformed:
    @pytest.mark.parametrize("c", CODECS, ids=str)
    @pytest.mark.parametrize("change", ["shorter", "longer", "empty", "header", "junk"])
    def test_a_wrong_length_is_refused(self, c, change):
        good = c.encode(values(100), draw=0).tobytes()
        bad = {
            "shorter": good[:-1],
            "longer": good + b"\0",
            "empty": b"",
            "header": good[:15],
            "junk": bytes(len(good)),
        }[change]
        out = np.full(100, 7, np.float32)
        with pytest.raises(CodecError):
            codec.decode(bad, out)
        assert (out == 7).all()

    @pytest.mark.parametrize("c", CODECS, ids=str)
    def test_a_count_beyond_all_memory_is_refused_before_memory_is_taken(self, c):
        buffer = c.encode(values(100), draw=0)
        buffer[8:16] = np.frombuffer(struct.pack("<Q", 2**62), np.uint8)
        with pytest.raises(CodecError):
            codec.decoded(buffer)

    def test_the_error_names_both_values(self):
        buffer = Int8().encode(values(1000), draw=0)
        with pytest.raises(CodecError, match="take 1032 bytes, the buffer has 1031"):
            codec.decode(buffer[:-1], np.empty(1000, np.float32))
        with pytest.raises(CodecError, match="holds 1000 float32, out has 999 float64"):
            codec.decode(buffer, np.empty(999))
        with pytest.raises(CodecError, match="holds 1000 float32, out has 1000 float64"):
            codec.decode(buffer, np.empty(1000))
        with pytest.raises(CodecError, match=r"FP16.decode: the buffer was written by Int8"):
            FP16().decode(buffer, np.empty(1000, np.float32))

    @pytest.mark.parametrize("place", [0, 1, 2, 3])
    def test_what_no_codec_begins_with_is_refused(self, place):
        buffer = Int8().encode(values(1000), draw=0)
        buffer[place] ^= 0x80
        with pytest.raises(CodecError, match="as no result of encode"):
            codec.decode(buffer, np.empty(1000, np.float32))

    @pytest.mark.parametrize("count", [0, 999, 1001, 2**32, 2**63, 2**64 - 1])
    @pytest.mark.parametrize("c", CODECS, ids=str)
    def test_a_count_is_believed_by_nobody(self, c, count):
        buffer = c.encode(values(1000), draw=0)
        buffer[8:16] = np.frombuffer(struct.pack("<Q", count), np.uint8)
        with pytest.raises(CodecError):
            codec.decode(buffer, np.empty(1000, np.float32))

    @pytest.mark.parametrize("c", CODECS, ids=str)
    def test_a_parameter_is_believed_by_nobody(self, c):
        buffer = c.encode(values(1000), draw=0)
        buffer[4:8] = 0 if buffer[4:8].any() else 1
        with pytest.raises(CodecError):
            codec.decode(buffer, np.empty(1000, np.float32))

    @pytest.mark.parametrize("indices", [[0, 1, 1000], [5, 4, 6], [5, 5, 6], [0, 1, 2**32 - 1]])
    def test_indices_out_of_range_or_order_are_refused(self, indices):
        buffer = TopK(0.003).encode(values(1000))
        buffer[-12:] = np.array(indices, np.uint32).view(np.uint8)
        out = np.full(1000, 7, np.float32)
        with pytest.raises(CodecError, match="do not ascend, or reach beyond the 1000"):
            codec.decode(buffer, out)
        assert (out == 7).all()

    @pytest.mark.parametrize("seed", range(4))
    def test_damage_is_an_error_or_an_array_and_nothing_else_is_touched(self, seed):
        rng = np.random.default_rng(seed)
        fates = [self.damage_once(rng) for _ in range(500)]
        assert fates.count("refused") > 50
        assert fates.count("decoded") > 50

    def damage_once(self, rng):
        dtype, c = DTYPES[rng.integers(3)], CODECS[rng.integers(len(CODECS))]
        x = values(int(rng.integers(0, 700)), dtype)
        bad = damaged(c.encode(x, draw=0), rng)
        store = np.full(x.size + 64, 7, dtype)
        out = store[32 : 32 + x.size]
        try:
            codec.decode(bad, out)
        except CodecError:
            assert (store == 7).all()
            return "refused"
        assert (store[:32] == 7).all()
        assert (store[32 + x.size :] == 7).all()
        return "decoded"


def damaged(buffer, rng):
    """Return the buffer with bytes overwritten, lost or added, in the header or anywhere."""
    bad = buffer.copy()
    way = rng.integers(4)
    if way == 0:
        return bad[: rng.integers(bad.size)]
    if way == 1:
        return np.append(bad, rng.integers(0, 256, rng.integers(1, 9), np.uint8))
    reach = 16 if way == 2 else bad.size
    bad[rng.integers(0, reach, rng.integers(1, 4))] = rng.integers(0, 256, 1)
    return bad


@pytest.mark.parametrize("c", CODECS, ids=str)
class TestArguments:
    @pytest.mark.parametrize(
        "x",
        [
            [1.0],
            np.ones(4, np.int32),
            np.ones((2, 2), np.float32),
            np.ones(8, np.float32)[::2],
            np.ones(4, ">f4"),
            np.ma.masked_array(np.ones(4, np.float32), [0, 1, 0, 0]),
            np.zeros(17, np.uint8)[1:].view(np.float32),
        ],
        ids=["list", "int32", "2-d", "strided", "big-endian", "masked", "unaligned"],
    )
    def test_what_is_no_array_of_floats_is_refused_both_ways(self, c, x):
        with pytest.raises(TypeError, match=rf"{c.kind}.encode"):
            c.encode(x, draw=0)
        with pytest.raises(TypeError, match=rf"{c.kind}.decode"):
            c.decode(c.encode(values(4), draw=0), x)

    def test_a_read_only_out_is_refused(self, c):
        frozen = values(4)
        frozen.flags.writeable = False
        buffer = c.encode(frozen, draw=0)
        with pytest.raises(ValueError, match="read-only"):
            c.decode(buffer, frozen)
        buffer.flags.writeable = False
        with pytest.raises(TypeError, match="writable"):
            c.encode(frozen, out=buffer, draw=0)
        c.decode(buffer, np.empty(4, np.float32))

    def test_a_short_out_is_refused_with_both_lengths(self, c):
        nbytes = c.encoded_nbytes(100, "float32")
        with pytest.raises(ValueError, match=f"out has {nbytes - 1} bytes, {nbytes} are needed"):
            c.encode(values(100), out=np.empty(nbytes - 1, np.uint8), draw=0)

    @pytest.mark.parametrize("out", [np.empty(99, np.float32), np.empty((1, 999), np.uint8)])
    def test_out_must_be_bytes(self, c, out):
        with pytest.raises(TypeError, match="out must be an array of uint8"):
            c.encode(values(4), out=out, draw=0)


F16, F32 = CODES["float16"].kernel, CODES["float32"].kernel
BYTES = np.zeros(8, np.uint8)


class TestKernels:
    """The bindings themselves, which must not trust Python either."""

    @pytest.mark.parametrize(
        ("kernel", "arguments", "message"),
        [
            (_core.convert, (BYTES[:6], BYTES, F16, F32), "destination has 6 bytes, wanted 4"),
            (_core.convert, (BYTES[:4], BYTES[:7], F16, F32), "no whole number"),
            (_core.convert, (BYTES, BYTES, F32, F32), "to 16 bits, or back"),
            (_core.convert, (BYTES[:4], BYTES, 99, F32), "dtype 99: the codes are 0 to 14"),
            (_core.convert, (BYTES[1:5], BYTES[:2], F32, F16), "not aligned"),
            (_core.encode_int8, (BYTES[:5], BYTES, F32, 256, 0, 0), "has 5 bytes, wanted 6"),
            (_core.encode_int8, (BYTES[:6], BYTES, F32, 0, 0, 0), "block is 0"),
            (_core.encode_int8, (BYTES, BYTES, CODES["int32"].kernel, 1, 0, 0), "float16, float32"),
            (_core.decode_int8, (BYTES, BYTES, F32, 256), "has 8 bytes, wanted 6"),
            (_core.decode_int8, (BYTES, BYTES, F32, 0), "block is 0"),
            (_core.top_k, (np.empty(3, np.uint32), BYTES, 4), "k is 3 of 2"),
            (_core.top_k, (np.empty(1, np.uint32), BYTES, 0), "itemsize is 0"),
            (_core.top_k, (np.empty(1, np.uint32), BYTES, 1), "2, 4 or 8 bytes"),
        ],
    )
    def test_sizes_and_dtypes_are_checked(self, kernel, arguments, message):
        with pytest.raises(ValueError, match=message):
            kernel(*arguments)

    @pytest.mark.parametrize(
        ("kernel", "arguments"),
        [
            (_core.convert, (np.zeros(4, np.float16), BYTES, F16, F32)),
            (_core.convert, (np.zeros(8, np.uint8)[::2], BYTES, F16, F32)),
            (_core.encode_int8, (np.zeros(6, np.int8), BYTES, F32, 256, 0, 0)),
            (_core.decode_int8, (np.zeros(2, np.float32), BYTES[:6], F32, 256)),
            (_core.top_k, (np.zeros(1, np.int32), BYTES, 4)),
        ],
    )
    def test_arrays_are_never_converted(self, kernel, arguments):
        with pytest.raises(TypeError):
            kernel(*arguments)
