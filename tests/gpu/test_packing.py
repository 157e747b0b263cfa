"""Many arrays that share a buffer: one kernel moves them, and no bit is lost."""

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import choose, on_gpus
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.gpu.device import pack_tables
from ringcomm.gpu.kernels.pack import TENSORS_PER_LAUNCH

SIGNALLING = 0x7FA00001  # as a float32 a NaN that arithmetic would make quiet


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
@pytest.mark.parametrize(
    "dtype", ["int8", "bool", "float16", "int32", "float32", "int64", "complex128"]
)
def test_grouped_arrays_of_every_width_keep_their_bits(dtype, transport, tmp_path):
    counts = [3, 0, 70_000, 1, 9000]
    op = rc.MAX if dtype == "int32" else rc.SUM

    def values(rank, number):
        if op is rc.MAX:
            return SIGNALLING + whole_numbers(0, counts[number], np.int32, turn=number)
        return (whole_numbers(rank, counts[number], "int64", turn=number) % 7).astype(dtype)

    def body(rank):
        gpu = sim.current_gpu()
        xs = [sim.array(values(rank, number)) for number in range(len(counts))]
        totals = [rc.grouped_allreduce(xs, op) for _ in range(2)]
        return [[x.get() for x in each] for each in (xs, *totals)], gpu.n_packs

    for rank, (results, n_packs) in enumerate(on_gpus(2, body, tmp_path, **choose(transport))):
        xs, *totals = results
        for number in range(len(counts)):
            assert np.array_equal(xs[number], values(rank, number))
            expected = values(0, number)
            if op is rc.SUM:
                expected = expected + values(1, number)
            for total in totals:
                assert np.array_equal(total[number], expected)
        assert n_packs == (0 if dtype in ("int8", "bool") else 4)


def test_more_arrays_than_one_launch_takes(tmp_path):
    n = TENSORS_PER_LAUNCH + 1

    def body(rank):
        xs = [sim.array(np.full(1 + number % 3, number + rank, "f4")) for number in range(n)]
        totals = rc.grouped_allreduce(xs)
        return all((x.get() == 2 * number + 1).all() for number, x in enumerate(totals))

    assert on_gpus(2, body, tmp_path, **choose("ipc")) == [True, True]


@pytest.mark.parametrize("bound", ["layouts", "room"])
def test_no_more_tables_than_there_is_room_for(bound, tmp_path, monkeypatch):
    if bound == "layouts":
        monkeypatch.setattr(pack_tables, "_MOST_LAYOUTS", 2)

    def body(rank):
        gpu, packs = sim.current_gpu(), []
        if bound == "room":
            gpu.set_room(2 * 256)  # two tables; each begins at a multiple of 256
        for n in (3, 4, 5, 4):
            xs = [sim.array(np.full(5, rank + number, "f4")) for number in range(n)]
            totals = [x.get() for x in rc.grouped_allreduce(xs)]
            assert [int(total[0]) for total in totals] == [2 * number + 1 for number in range(n)]
            packs.append(gpu.n_packs)
        return packs

    assert on_gpus(2, body, tmp_path, **choose("ipc")) == [[2, 4, 4, 6]] * 2
