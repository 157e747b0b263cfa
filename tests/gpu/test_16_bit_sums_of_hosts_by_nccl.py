"""16-bit sums by NCCL between hosts: rounded once, or in their own dtype if the user says so."""

import itertools

import ml_dtypes
import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import on_gpus
from harness import at_length
from simulated_nccl import FakeCommunicator
from sums_rounded_once import HALVES, expected, values

import ringcomm as rc
from ringcomm.collectives.message_patterns import chunks
from ringcomm.config import Settings
from ringcomm.gpu.transports import nccl, slices
from ringcomm.gpu.transports.nccl_16_bit import SumsByHost

LAYOUTS = {
    "2 hosts x 2": (0, 0, 2, 2),
    "3 hosts x 2": (0, 0, 2, 2, 4, 4),
    "uneven": (0, 1, 1, 1),
    "interleaved": (0, 1, 0, 1),
}


@pytest.fixture
def sent(monkeypatch):
    """Return a list of (rank, peer, bytes) of all that NCCL sends."""
    messages = []
    send = FakeCommunicator.send

    def note(self, *arguments):
        _, nbytes, _, peer, _ = arguments
        messages.append((self._rank, peer, nbytes))
        send(self, *arguments)

    monkeypatch.setattr(FakeCommunicator, "send", note)
    return messages


def bytes_between_hosts(nodes, call, folder, sent):
    """Return the bytes that hosts send to others in call(rank); the fixture `sent` notes them."""

    def body(rank):
        rc.allreduce_(sim.array(np.zeros(1, ml_dtypes.bfloat16)))  # connects
        rc.barrier()
        if rank == 0:
            sent.clear()
        rc.barrier()
        made = call(rank)
        return made and made.get()

    on_gpus(len(nodes), body, folder, transport="nccl", nodes=nodes)
    return sum(n for rank, peer, n in sent if nodes[rank] != nodes[peer])


@pytest.mark.parametrize("layout", at_length(LAYOUTS, [*LAYOUTS][1:3]))
def test_the_exact_sum_is_rounded_once(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "STAGING_NBYTES", 1 << 15)  # several passes
    nodes = LAYOUTS[layout]
    cases = list(itertools.product(HALVES, (rc.SUM, rc.AVERAGE, rc.MAX), (1, 10_007)))
    # The two layouts of the gate have each case once: few of one dtype where the other has many.
    has_many = HALVES[layout == "uneven"]
    cases = at_length(cases, [each for each in cases if (each[0] == has_many) == (each[2] > 1)])

    def body(rank):
        made = [(sim.array(values(rank, n, dtype)), op) for dtype, op, n in cases]
        return [rc.allreduce_(x, op).get() for x, op in made]

    for results in on_gpus(len(nodes), body, tmp_path, transport="nccl", nodes=nodes):
        for (dtype, op, n), x in zip(cases, results, strict=True):
            assert np.array_equal(x, expected(len(nodes), n, dtype, op)), (dtype, op, n)


@pytest.mark.parametrize("layout", ["2 hosts x 2", "3 hosts x 2"])
def test_a_host_sends_float32_once_and_the_result_once(layout, tmp_path, sent):
    nodes, count = LAYOUTS[layout], 10_007

    def call(rank):
        return rc.allreduce_(sim.array(values(rank, count, ml_dtypes.bfloat16)))

    n_hosts = len(set(nodes))
    over = bytes_between_hosts(nodes, call, tmp_path, sent)
    assert over == (4 + 2) * count * (n_hosts - 1)


WIDE_LAYOUTS = {
    "2 hosts x 3": (0, 0, 0, 3, 3, 3),
    "one and four": (0, 1, 1, 1, 1),
    "interleaved": (0, 1, 0, 1, 0, 1, 1),
}


@pytest.mark.parametrize("layout", at_length(WIDE_LAYOUTS, ["interleaved"]))
def test_the_rows_of_a_rank_and_the_sum_for_one_are_rounded_once(layout, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "STAGING_NBYTES", 1 << 15)  # several passes
    nodes = WIDE_LAYOUTS[layout]
    size, root = len(nodes), len(nodes) - 1
    cases = list(itertools.product(HALVES, (rc.SUM, rc.AVERAGE, rc.MAX), (1, 10_007)))
    cases = at_length(cases, cases[:: 3 if layout == "2 hosts x 3" else 5])

    def body(rank):
        found = []
        for dtype, op, n in cases:
            x = sim.array(values(rank, n, dtype))
            apart, whole = rc.reduce_scatter(x, op).get(), rc.reduce(x, op, root=root)
            assert np.array_equal(x.get(), values(rank, n, dtype))
            found.append((apart, rc.reduce_scatter_(x, op).get(), whole and whole.get()))
        return found

    fits = []
    is_fit = SumsByHost.is_fit
    monkeypatch.setattr(SumsByHost, "is_fit", lambda *a: fits.append(is_fit(*a)) or fits[-1])
    settings = Settings(timeout_s=40)
    results = on_gpus(size, body, tmp_path, transport="nccl", nodes=nodes, settings=settings)
    assert all(fits)
    for k, (dtype, op, n) in enumerate(cases):
        total = expected(size, n, dtype, op)
        for rank, part in enumerate(chunks(n, size)):
            apart, in_place, whole = results[rank][k]
            assert np.array_equal(apart, total[part]), (dtype, op, n, rank)
            assert np.array_equal(in_place, total[part]), (dtype, op, n, rank)
            assert (whole is None) == (rank != root)
        assert np.array_equal(whole, total), (dtype, op, n)


@pytest.mark.parametrize("seed", at_length(range(30), range(2)))
def test_any_ranks_on_any_hosts_get_their_rows(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(slices, "STAGING_NBYTES", 1 << 13)
    random = np.random.default_rng(seed)
    hub = [int(host) for host in random.integers(0, 2, int(random.integers(5, 9)))]
    nodes = tuple(hub.index(host) for host in hub)
    size, root = len(nodes), int(random.integers(0, len(nodes)))
    shape = (int(random.integers(0, 60)), *(3, 7)[: random.integers(0, 3)])
    rows = random.integers(-8, 8, (size, *shape)).astype(HALVES[seed % 2])

    def body(rank):
        x = sim.array(rows[rank])
        whole = rc.reduce(x, root=root)
        return rc.reduce_scatter(x).get(), whole and whole.get()

    found = on_gpus(size, body, tmp_path, transport="nccl", nodes=nodes, seed=seed)
    total = rows.astype(np.float32).sum(0).astype(rows.dtype)
    assert np.array_equal(np.concatenate([part for part, _ in found]), total)
    assert np.array_equal(found[root][1], total)


@pytest.mark.parametrize("call", ["reduce_scatter", "reduce"])
def test_a_host_of_three_sends_its_float32_sums_once(call, tmp_path, sent):
    nodes, count = WIDE_LAYOUTS["2 hosts x 3"], 6 * 1234

    def make(rank):
        return getattr(rc, call)(sim.array(values(rank, count, ml_dtypes.bfloat16)))

    over = bytes_between_hosts(nodes, make, tmp_path, sent)
    results = count if call == "reduce" else 0  # half of the elements, with 2 bytes each
    assert abs(over - 4 * count - results) <= 64  # pieces begin at multiples of 16 bytes


@pytest.mark.parametrize("adds_16bit", [0, 1])
def test_nccl_adds_16_bits_itself_only_if_it_is_told_to(adds_16bit, tmp_path, monkeypatch):
    reduced, all_reduce = [], FakeCommunicator.all_reduce

    def note(self, *arguments):
        reduced.append(arguments[3])
        all_reduce(self, *arguments)

    monkeypatch.setattr(FakeCommunicator, "all_reduce", note)
    settings = Settings(timeout_s=120, nccl_16bit_sums=adds_16bit)

    def body(rank):
        x = sim.array(np.full(9, rank + 1, ml_dtypes.bfloat16))
        ordered = rc.allreduce(x, deterministic=True).get()
        return rc.allreduce(x).get().tolist(), rc.allreduce(x, rc.AVERAGE).get(), ordered

    for total, mean, ordered in on_gpus(3, body, tmp_path, transport="nccl", settings=settings):
        assert total == ordered.tolist() == [6] * 9
        assert mean.tolist() == [2] * 9
    is_used = nccl.DATA_TYPES["bfloat16"] in reduced
    assert is_used == bool(adds_16bit)
