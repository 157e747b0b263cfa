"""Rows of hash tables in 16 or 8 bits, each for itself."""

import harness
import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import codec, ps
from ringcomm.codec.int8 import take_blocks

pytestmark = pytest.mark.one_wire

N, DIM = 3000, 9
KEYS = np.random.default_rng(0).permutation(N).astype(np.uint64) * np.uint64(7919)


def rows(seed=0, dtype=np.float32):
    """Rows of very different magnitudes."""
    rng = np.random.default_rng(seed)
    sizes = 10.0 ** rng.integers(-3, 3, (N, 1))
    return (rng.standard_normal((N, DIM)) * sizes).astype(dtype)


def steps_of(x):
    """The distance of two codes of int8, by row."""
    return np.abs(x).max(axis=1, keepdims=True) / 127


def bfloat16(x):
    """Rounded to 8 bits, ties to even."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("c", "rounded"),
    [("fp16", lambda x: x.astype(np.float16)), ("bf16", bfloat16), (codec.Identity(), np.array)],
    ids=["fp16", "bf16", "identity"],
)
def test_rows_are_pushed_in_16_bits(c, rounded, mode, dtype):
    x = rows()

    def body(_):
        kv = ps.hashtable("e", DIM, updater=ps.optim.Add(), dtype=dtype, mode=mode, compression=c)
        kv.push(KEYS, x.astype(dtype))
        return kv.pull(KEYS).wait()

    assert np.array_equal(run_workers(1, body, 3)[0], rounded(x).astype(dtype))


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_int8_rows_are_right_on_average_with_a_scale_of_their_own(mode, dtype):
    x, n = rows(dtype=dtype), 60

    def body(_):
        kv = ps.hashtable(
            "e", DIM, dtype=dtype, updater=ps.optim.Add(), mode=mode, compression="int8"
        )
        kv.push(KEYS, x)
        once = kv.pull(KEYS).wait().copy()
        for _ in range(n - 1):
            kv.push(KEYS, x)
        return once, kv.pull(KEYS).wait()

    once, total = run_workers(1, body, 3)[0]
    assert (np.abs(once - x) <= 1.001 * steps_of(x)).all()
    errors = (total / n - x) / steps_of(x)
    assert np.abs(errors).max() < 5.5 / 2 / n**0.5  # of 27,000 numbers
    assert abs(errors.mean()) < 5 / 2 / (n * N * DIM) ** 0.5


@pytest.mark.parametrize("c", ["fp16", "bf16", "int8"])
def test_pushes_have_the_same_bits_on_any_number_of_servers_and_wire(c, monkeypatch):
    found = set()
    for wire, n_servers in (("messages", 1), ("messages", 3), ("node", 1), ("node", 2)):
        monkeypatch.setattr(harness, "wire", wire)

        def body(rank):
            kv = ps.hashtable("e", DIM, updater=ps.optim.Adagrad(0.1), mode="sync", compression=c)
            for step in range(4):
                kv.push(KEYS, rows(10 * rank + step), weight=rank + 1)
            return kv.pull(KEYS).wait().tobytes()

        found |= set(run_workers(2, body, n_servers))
    assert len(found) == 1


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize(
    ("c", "bound"), [("fp16", 2**-11), ("bf16", 2**-8), ("int8", 1 / 127)], ids=str
)
def test_pulls_are_compressed_and_rows_stay_exact(c, bound):
    x = rows()

    def body(rank):
        kv = ps.hashtable("e", DIM, updater=ps.optim.Add(), mode="sync", pull_compression=c)
        kv.push(KEYS, x)
        seen = kv.pull(KEYS).wait()
        out = np.empty((N, DIM), np.float32)
        assert kv.pull(KEYS, out=out).wait() is out
        assert np.array_equal(out, seen)
        kv.push(KEYS, x)  # what is added to is what was there, not what was seen
        again = kv.pull(KEYS).wait()
        some = kv.pull(KEYS[[5, 3, 5]].reshape(3, 1)).wait()
        assert some.shape == (3, 1, DIM)
        assert np.array_equal(kv.pull(KEYS, exact=True).wait(), 2 * x)
        return seen, again, kv.pull(np.array([1, 2]), missing="zero").wait()

    results = run_workers(2, body, 2)
    for seen, again, unknown in results:
        assert np.array_equal(seen, results[0][0])
        for got, expected in ((seen, x), (again, 2 * x)):
            error = np.abs(got - expected) / np.abs(expected).max(axis=1, keepdims=True)
            assert 0 < error.max() <= bound * 1.001
        assert not unknown.any()


def test_fewer_bytes_travel(monkeypatch):
    monkeypatch.setattr(harness, "wire", "messages")
    dim, x = 64, np.ones((N, 64), np.float32)

    def body(_):
        told = []
        for k, c in enumerate([None, "fp16", "int8"]):
            kv = ps.hashtable(f"e{k}", dim, compression=c, pull_compression=c)
            before = ps.stats()[0]
            kv.push(KEYS, x).wait()
            between = ps.stats()[0]
            kv.pull(KEYS).wait()
            after = ps.stats()[0]
            told.append(
                (between["nbytes_in"] - before["nbytes_in"],
                 after["nbytes_out"] - between["nbytes_out"])
            )  # fmt: skip
        return told

    plain, fp16, int8 = run_workers(1, body)[0]
    assert fp16[0] < 0.53 * plain[0]
    assert int8[0] < 0.3 * plain[0]
    assert fp16[1] < 0.51 * plain[1]
    assert int8[1] < 0.28 * plain[1]


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("c", ["fp16", "bf16", "int8"])
def test_who_has_no_keys_takes_part_in_a_round(c):
    def body(rank):
        kv = ps.hashtable("e", DIM, updater=ps.optim.Add(), mode="sync", compression=c)
        n = 0 if rank else N
        kv.push(KEYS[:n], np.ones((n, DIM), np.float32))
        assert kv.pull(KEYS[:0]).wait().shape == (0, DIM)
        return kv.pull(KEYS).wait()

    for values in run_workers(2, body, 2):
        np.testing.assert_allclose(values, 0.5, rtol=1e-6)


def test_a_key_that_comes_twice_is_updated_with_the_sum():
    def body(_):
        kv = ps.hashtable("e", DIM, updater=ps.optim.Add(), compression="int8")
        kv.push([3, 8, 3], np.full((3, DIM), 127, np.float32))
        return kv.pull([3, 8]).wait()[:, 0].tolist()

    assert run_workers(1, body, 2) == [[254, 127]]


def test_rows_that_are_assigned_go_as_they_are():
    x = rows()

    def body(_):
        for c in ("fp16", "bf16", "int8"):
            kv = ps.hashtable(c, DIM, compression=c)
            kv.push(KEYS, x, assign=True)
            if not np.array_equal(kv.pull(KEYS).wait(), x):
                yield c

    assert run_workers(1, lambda rank: [*body(rank)], 2) == [[]]


@pytest.mark.parametrize("c", ["fp16", "bf16", "int8"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused_unless_it_is_allowed(c, bad):
    x = np.ones((4, DIM), np.float32)
    x[2, 3] = bad

    def body(_):
        kv = ps.hashtable("e", DIM, updater=ps.optim.Add(), compression=c)
        with pytest.raises(ValueError, match=r"push\[e\]: NaN or inf among the 4 rows"):
            kv.push(range(4), x)
        assert len(kv) == 0
        lax = ps.hashtable("lax", DIM, updater=ps.optim.Add(), compression=c, nan="allow")
        lax.push(range(4), x)
        return np.isfinite(lax.pull(range(4)).wait()).all(axis=1).tolist()

    assert run_workers(1, body) == [[True, True, False, True]]


def test_what_fp16_makes_infinite_is_refused():
    def body(_):
        kv = ps.hashtable("e", 1, compression="fp16")
        with pytest.raises(ValueError, match="NaN or inf"):
            kv.push([1], np.array([[1e6]], np.float32))
        return len(kv)

    assert run_workers(1, body) == [0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compression": codec.TopK(0.1)}, "error feedback, which dense tables have"),
        ({"pull_compression": codec.TopK(0.1)}, "most values would read as 0"),
        ({"compression": "fp8"}, r"hashtable\[e\]: compression is 'fp8'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    def body(_):
        with pytest.raises(ValueError, match=message):
            ps.hashtable("e", DIM, **options)
        return True

    assert run_workers(1, body) == [True]


def test_ranks_that_disagree_are_told_both_values():
    def body(rank):
        if rank == 0:
            ps.hashtable("e", DIM, compression="fp16")
        rc.barrier()
        if rank == 1:
            with pytest.raises(rc.MismatchError, match=r"'FP16'.* rank 1 opens it with .*'BF16'"):
                ps.hashtable("e", DIM, compression="bf16")
        return True

    assert run_workers(2, body) == [True, True]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("blocks", [[], [3], [2, 0, 2], slice(None)], ids=str)
def test_blocks_that_are_taken_are_decoded_as_before(blocks, dtype):
    x = np.random.default_rng(0).standard_normal((5, DIM)).astype(dtype)
    buffer = codec.Int8(block=DIM).encode(x.reshape(-1), draw=1)
    blocks = np.array(blocks, np.int64) if isinstance(blocks, list) else blocks
    taken = take_blocks(buffer, blocks)
    expected = codec.decoded(buffer).reshape(5, DIM)[blocks]
    codec.check(taken, expected.size, dtype)
    assert np.array_equal(codec.decoded(taken).reshape(-1, DIM), expected)
