"""Tests that every rank of a job runs at once, on one host or several; not collected by itself.

LAYOUT, if set, names the host that each rank is to be on.
"""

import itertools
import os
import random
import re
import socket
from pathlib import Path

import leftovers_plugin
import ml_dtypes
import numpy as np
import pytest
import transport_conformance
from harness import IS_MPICH, at_length
from mpi4py import rc as mpi4py_rc
from random_programs import make_program, run_program
from run_algorithms import CASES, body_of, channel, drive, flat
from sample_values import total, whole_numbers

import ringcomm as rc
from ringcomm._core import WireFault
from ringcomm.collectives import cartesian
from ringcomm.collectives.algorithms import ring
from ringcomm.collectives.recording import perform
from ringcomm.engine.api import init_rank_size, world
from ringcomm.transport import mpi as mpi_transport
from ringcomm.transport.presence import Presence

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.int32, np.int64]


@pytest.fixture(scope="module", autouse=True)
def job():
    rc.init()
    yield
    rc.shutdown()


@pytest.fixture
def mpi():
    from mpi4py import MPI

    return MPI


def test_ringcomm_owns_the_end_of_mpi(mpi):
    assert mpi4py_rc.finalize is False
    assert mpi.Query_thread() == mpi.THREAD_MULTIPLE


def test_ranks_are_those_of_mpi(mpi):
    assert (rc.rank(), rc.size()) == (mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size)


@pytest.mark.skipif(IS_MPICH, reason="its ranks listen, and no connection stops them")
def test_no_rank_listens_where_all_are_on_one_host():
    """Open MPI reads what connects to a rank without a deadline: one byte would stop the job."""
    is_one_host = rc.cross_size() == 1 and rc.local_size() == rc.size()
    assert leftovers_plugin.listening_ports() == {} or not is_one_host
    assert "OMPI_MCA_btl" not in os.environ or not is_one_host  # a child job may be over hosts


def test_a_core_dump_has_the_page_of_status_that_of_stop_signals_and_no_arena():
    rc.zeros(1000, "float32")
    areas = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    dumped = [area for area in areas if " dd" not in area.partition("VmFlags:")[2]]
    assert set(re.findall(r"/memfd:ringcomm-(\w+)", "".join(dumped))) == {"status", "stop"}


def hosts_of_ranks():
    hosts = rc.allgather_object(socket.gethostname())
    assert hosts == os.environ.get("LAYOUT", " ".join(hosts)).split()
    return hosts


def ranks_of_this_host():
    return [r for r, host in enumerate(hosts_of_ranks()) if host == socket.gethostname()]


def test_ranks_are_numbered_within_their_host_and_across_hosts():
    ours = ranks_of_this_host()
    assert (rc.local_rank(), rc.local_size()) == (ours.index(rc.rank()), len(ours))
    hosts = hosts_of_ranks()
    in_order = sorted(set(hosts), key=hosts.index)
    across = [host for host in in_order if hosts.count(host) > rc.local_rank()]
    assert (rc.cross_rank(), rc.cross_size()) == (across.index(hosts[rc.rank()]), len(across))


def test_init_twice_is_once():
    before = init_rank_size.engine()
    rc.init()
    assert init_rank_size.engine() is before


def own_transport(mpi, **options):
    """Return a transport whose control messages the engine of this job does not see.

    Transports of the world share one communicator for them, for only one lives at a time. Here two
    do, and the thread of the engine would receive what is meant for this one.
    """
    return mpi_transport.MpiTransport(Presence(mpi, mpi.COMM_WORLD), **options)


@pytest.mark.parametrize("body", transport_conformance.BODIES, ids=lambda body: body.__name__)
def test_transport(body, mpi):
    if rc.size() == 1:
        pytest.skip("a rank alone sends no message that could have another size")
    transport = own_transport(mpi)
    body(transport)
    transport.close(is_clean=True)
    rc.barrier()


@pytest.fixture(scope="module")
def wires():
    """One wire without Python, one that cuts messages into pieces of 1000 bytes, one with it."""
    from mpi4py import MPI

    whole = own_transport(MPI)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_transport, "_SEGMENT", 1000)
        cut = own_transport(MPI)
    made = {"whole": whole, "cut": cut, "python": own_transport(MPI, is_native=False)}
    yield made
    rc.barrier()
    for transport in made.values():
        transport.close(is_clean=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize("count", [1, 10_000])
def test_the_bits_without_python_are_those_of_the_coroutine(case, count, wires):
    whole, cut, python = (
        drive(body_of(case, count)(channel(wires[name])))[0] for name in ("whole", "cut", "python")
    )
    assert whole.tobytes() == python.tobytes()
    assert cut.tobytes() == python.tobytes()


@pytest.mark.parametrize("wire", ["whole", "cut"])
def test_an_operation_that_comes_again_keeps_what_it_had(wire, wires):
    x, runner = np.empty(2000, np.float32), wires[wire].runner
    before = None
    for turn in range(at_length(100, 20)):
        x[:] = whole_numbers(rc.rank(), x.size, turn=turn % 7)
        drive(perform(ring.allreduce_, channel(wires[wire], tag=1), flat(x)))
        assert np.array_equal(x, total(rc.size(), x.size, turn=turn % 7))
        kept = runner.n_idle, runner.idle_nbytes
        assert before in (None, kept)
        before = kept


def test_a_message_of_another_size_is_a_fault_without_python_too(wires):
    if rc.size() == 1:
        pytest.skip("needs a peer")
    x = np.ones(1000 if rc.rank() == 0 else 2000, np.float32)
    if rc.rank() < 2:
        t = channel(wires["whole"], tag=2)
        t = t.among((0, 1))
        with pytest.raises(WireFault):  # too long for rank 0, too short for rank 1
            drive(perform(ring.allreduce_, t, flat(x)))
        t.abandon()
    rc.barrier()


def test_abandoned_receives_take_no_message_without_python_either(wires):
    right, left = (rc.rank() + 1) % rc.size(), (rc.rank() - 1) % rc.size()
    forgotten, out = np.zeros(8, np.uint8), np.empty(8, np.uint8)

    async def receive_(x, source, t):
        await t.wait(t.irecv(x.bytes, source))

    t = channel(wires["whole"], tag=3)
    strand = perform(receive_, t, flat(forgotten), left)
    strand.send(None)
    strand.close()
    t.abandon()
    rc.barrier()
    transport = wires["whole"]
    transport_conformance.finish(
        transport,
        transport.irecv(out, left, t.tag),
        transport.isend(np.full(8, 7, np.uint8), right, t.tag),
    )
    assert (out == 7).all()
    assert (forgotten == 0).all()


@pytest.mark.parametrize("seed", range(at_length(12, 6)))
def test_random_program_against_numpy(seed):
    """The same random shapes, dtypes and operations on every rank, checked against numpy."""
    rng = np.random.default_rng(seed)
    for _ in range(8):
        dtype = DTYPES[rng.integers(len(DTYPES))]
        shape = tuple(int(n) for n in rng.integers(0, 9, rng.integers(1, 4)))
        data = rng.integers(-8, 8, (rc.size(), *shape)).astype(dtype)
        root = int(rng.integers(rc.size()))
        total = data.astype(np.float64).sum(0).astype(dtype)
        mine = data[rc.rank()]
        assert np.array_equal(rc.allreduce(mine), total)
        assert np.array_equal(rc.allgather(mine), np.concatenate(list(data)))
        assert np.array_equal(rc.broadcast(mine, root), data[root])
        assert np.array_equal(rc.allgather(rc.reduce_scatter(mine)), total)
        assert np.array_equal(rc.allreduce(mine, rc.MAX, deterministic=True), data.max(0))
        before = data[: rc.rank()].astype(np.float64).sum(0)
        assert np.array_equal(rc.exscan(mine), before.astype(dtype))
        assert np.array_equal(rc.scan(mine), (before + mine).astype(dtype))
        reduced, gathered = rc.reduce(mine, root=root), rc.gather(mine, root)
        if rc.rank() == root:
            assert np.array_equal(reduced, total)
            assert np.array_equal(gathered, np.concatenate(list(data)))
        rows = rc.scatter(mine if rc.rank() == root else None, root)
        assert np.array_equal(rc.allgather(rows), data[root])
        splits = rng.multinomial(shape[0], np.ones(rc.size()) / rc.size(), rc.size())
        received = [
            data[r][splits[r][: rc.rank()].sum() :][: splits[r][rc.rank()]]
            for r in range(rc.size())
        ]
        assert np.array_equal(rc.alltoall(mine, splits[rc.rank()]), np.concatenate(received))
        for each in rc.grouped_allreduce([mine, mine[:1]]):
            assert np.array_equal(each, total[: len(each)])


@pytest.mark.parametrize("seed", range(at_length(15, 8)))
def test_random_programs_with_groups_and_asynchronous_operations(seed):
    run_program(make_program(seed, rc.size()), rc.rank(), seed)


@pytest.mark.parametrize("dtype", [np.float16, np.int64])
def test_a_scan_of_several_segments(dtype):
    x = whole_numbers(rc.rank(), 300_007, dtype)  # also of several pieces in shared memory
    assert np.array_equal(rc.scan(x), total(rc.rank() + 1, x.size, dtype))
    before = rc.exscan_async(x, name="exscan").wait()
    assert np.array_equal(before, total(rc.rank(), x.size, dtype) if rc.rank() else 0 * x)


def test_numbers_come_back_as_numbers():
    rank, size = rc.rank(), rc.size()
    for _ in range(4):
        assert rc.allreduce(rank + 0.5) == size * size / 2
        assert rc.broadcast(np.int16(rank), size - 1) == np.int16(size - 1)
        assert rc.allreduce(rank) == size * (size - 1) // 2
        assert rc.reduce(rank == 0, root=0) is (True if rank == 0 else None)


def test_a_split_gives_each_color_a_group_ordered_by_key():
    rank, ranks = rc.rank(), list(range(rc.size()))
    half = rc.split(rank % 2, -rank)
    assert list(half.ranks) == ranks[rank % 2 :: 2][::-1]
    assert rc.allgather(np.array([rank]), group=half).tolist() == list(half.ranks)
    first = rc.split(0 if half.rank == 0 else None, group=half)
    assert (first is None) == (half.rank > 0)
    assert first is None or first.ranks == half.ranks[:1]


def test_contexts_of_dropped_groups_are_used_again(monkeypatch):
    wire = init_rank_size.engine().transport
    monkeypatch.setattr(wire, "tags", wire.tags._replace(n_contexts=8))
    before, ranks = [], list(range(rc.size()))
    for index in range(60):
        group = rc.Group(ranks if index % 2 else ranks[::-1])
        mine = whole_numbers(rc.rank(), 1 + index * 997, turn=index)
        handles = [rc.allreduce_async(mine, group=group, name=name) for name in (None, "w")]
        before.append((index, handles))
        if len(before) > 1 + rc.rank() % 2:
            last, handles = before.pop(0)
            for handle in handles:
                assert np.array_equal(handle.wait(), total(rc.size(), 1 + last * 997, turn=last))
        del group, handles


def test_many_named_operations_start_in_another_order_on_each_rank():
    counts = [0, 1, 1000, 100_000]
    for turn in range(3):
        order = [(i, counts[i % 4]) for i in range(24)]
        random.Random(f"{rc.rank()} {turn}").shuffle(order)
        handles = {
            i: rc.allreduce_async_(whole_numbers(rc.rank(), n, turn=i), name=f"many {i}")
            for i, n in order
        }
        for i, handle in handles.items():
            assert np.array_equal(handle.wait(), total(rc.size(), counts[i % 4], turn=i))


@pytest.mark.parametrize("count", [4, 300_000])
def test_a_stale_name_is_poisoned_and_nothing_is_left_on_the_wire(count):
    """Also where the data waits for its receive: the stream is never used again."""
    if rc.size() == 1:
        pytest.skip("needs a peer")
    name = f"stale {count}"
    for _ in range(3):
        assert rc.allreduce(np.ones(count), name=name)[-1] == rc.size()
        rc.allreduce(np.ones(count), name=name)
        with pytest.raises(rc.MismatchError, match="rank 1 sent"):
            rc.allreduce_(np.ones(count + (rc.rank() == 1)), name=name)


@pytest.mark.parametrize("count", [0, 3, 1 << 20])
def test_messages_between_pairs(count):
    right, left = (rc.rank() + 1) % rc.size(), (rc.rank() - 1) % rc.size()
    out = np.zeros(count, np.float32)
    assert rc.sendrecv(whole_numbers(rc.rank(), count), right, out, left) == left
    assert np.array_equal(out, whole_numbers(left, count))
    again = np.zeros(count, np.float32)
    handles = [rc.irecv(again, left, tag=1), rc.isend(out, right, tag=1), rc.barrier_async()]
    assert rc.wait_all(handles) == [left, None, None]
    assert np.array_equal(again, whole_numbers((left - 1) % rc.size(), count))
    if rc.rank() == 0:
        sources = {rc.recv(out, rc.ANY_SOURCE, tag=5) for _ in range(rc.size() - 1)}
        assert sources == set(range(1, rc.size()))
    else:
        rc.send(out, 0, tag=5)


def test_chosen_dims_are_those_of_mpi(mpi):
    for size, n in itertools.product(range(1, 65), (1, 2, 3)):
        assert list(cartesian.completed(size, [0] * n)) == mpi.Compute_dims(size, n)
    for size, dims in ((12, [0, 2, 0]), (60, [0, 0, 5]), (12, [2, 0])):
        assert list(cartesian.completed(size, dims)) == mpi.Compute_dims(size, dims)


@pytest.mark.parametrize("periodic", [True, False])
def test_a_grid_is_that_of_mpi(periodic, mpi):
    grid = rc.Grid((0, 0), (periodic, not periodic))
    comm = mpi.COMM_WORLD.Create_cart(grid.dims, grid.periodic)
    assert [comm.Get_coords(r) for r in range(rc.size())] == [
        list(grid.coords_of(r)) for r in range(rc.size())
    ]
    nobody = {mpi.PROC_NULL: rc.PROC_NULL}
    for dimension, displacement in itertools.product((0, 1), (1, -2, 3)):
        expected = comm.Shift(dimension, displacement)
        found = grid.shift(dimension, displacement)
        assert found == tuple(nobody.get(rank, rank) for rank in expected)
    comm.Free()


@pytest.mark.parametrize("n", [3, 3000])
def test_ghost_cells_are_the_edges_of_neighbours(n):
    grid = rc.Grid((0, 0), True)
    for turn in range(3):
        x = np.full((6, n + 2), -1.0)
        x[1:-1, 1:-1] = 100 * rc.rank() + turn + np.arange(4)[:, None]
        grid.exchange_halo(x)
        (up, down), (left, right) = grid.neighbours
        assert (x[0, 1:-1] == 100 * up + turn + 3).all()
        assert (x[-1, 1:-1] == 100 * down + turn).all()
        for side, rank in ((0, left), (-1, right)):
            assert x[1:-1, side].tolist() == [100 * rank + turn + i for i in range(4)]
            corner = grid.rank_of((grid.coords[0] + 1, grid.coords_of(rank)[1]))
            assert x[-1, side] == 100 * corner + turn


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 4096, 300_001, 1 << 20])
def test_large_allreduce(dtype, count):
    x, expected = whole_numbers(rc.rank(), count, dtype), total(rc.size(), count, dtype)
    assert np.array_equal(rc.allreduce(x), expected)
    assert np.array_equal(rc.allreduce_(x), expected)


def test_one_message_can_be_cut_into_many(monkeypatch):
    monkeypatch.setattr(mpi_transport, "_SEGMENT", 1000)
    right, left = (rc.rank() + 1) % rc.size(), (rc.rank() - 1) % rc.size()
    out = np.zeros(10_000, np.float32)
    rc.sendrecv(whole_numbers(rc.rank(), 10_000), right, out, left)
    assert np.array_equal(out, whole_numbers(left, 10_000))


def test_mismatch_is_agreed_on_and_the_engine_works_on():
    if rc.size() > 1:
        with pytest.raises(rc.MismatchError, match="rank 1 sent float64"):
            rc.allreduce(np.ones(3, np.float64 if rc.rank() == 1 else np.float32), name="w")
        with pytest.raises(rc.MismatchError, match="barrier"):
            rc.barrier() if rc.rank() == 0 else rc.allgather(np.ones(2))
    assert rc.allreduce(np.ones(2))[0] == rc.size()


def test_objects_travel():
    assert rc.broadcast_object([rc.rank(), "x" * 100_000], rc.size() - 1)[0] == rc.size() - 1
    assert [len(each) for each in rc.allgather_object("x" * rc.rank())] == list(range(rc.size()))
    everybody, last = [*range(rc.size())], rc.size() - 1
    assert rc.gather_object(rc.rank(), last) == (everybody if rc.rank() == last else None)
    assert rc.scatter_object(everybody if rc.rank() == last else None, last) == rc.rank()
    if rc.rank() == last:
        found = [rc.recv_object(tag=9) for _ in range(last)]
        assert sorted(found) == [(str(rank) * 9000, rank) for rank in range(last)]
    else:
        rc.send_object(str(rc.rank()) * 9000, last, tag=9)


def test_the_status_page_says_what_the_rank_does():
    rc.allreduce(np.ones(10), name="on the page")
    init_rank_size.engine().note_step(5)
    seen = world.current().transport.page.snapshot()
    assert (seen["rank"], seen["size"], seen["step"]) == (rc.rank(), rc.size(), 5)
    assert seen["op_name"] == "allreduce[on the page]"
    assert seen["op_nbytes"] == 80


def test_neighbours_are_watched_and_their_pages_mapped():
    neighbours = world.current().presence._neighbours
    assert sorted([*neighbours.watched, rc.rank()]) == ranks_of_this_host()
    for rank in neighbours.ranks:
        assert neighbours[rank].page.snapshot()["rank"] == rank


def test_operations_leave_no_request_behind():
    import gc

    before = list(mpi_transport._grave)
    for _ in range(50):
        rc.allreduce(np.ones(100_000, np.float32))
    gc.collect()
    transport = world.current().transport
    rc.barrier()
    assert mpi_transport._grave == before
    assert len(transport._outbox) <= rc.size()


def test_shutdown_then_init_again(mpi):
    for _ in range(3):
        rc.shutdown()
        assert not rc.is_initialized()
        with pytest.raises(rc.NotInitializedError):
            rc.barrier()
        rc.init()
        assert rc.allreduce(np.ones(1))[0] == rc.size()


def test_a_communicator_of_some_ranks(mpi):
    rc.shutdown()
    half = mpi.COMM_WORLD.Split(mpi.COMM_WORLD.rank % 2)
    rc.init(half)
    assert (rc.rank(), rc.size()) == (half.rank, half.size)
    assert rc.allreduce(np.ones(1))[0] == half.size
    rc.shutdown()
    half.Free()
    rc.init()
