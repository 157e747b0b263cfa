"""What the ranks of one node do in shared memory, over ranks as threads."""

import os
import re
import signal
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from faulty_transport import Faults
from harness import DEADLINE_S, at_length, outcomes, run_ranks, wait_until
from loopback import LoopbackHub
from sample_values import total, whole_numbers

import ringcomm as rc
from ringcomm import _core
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.transport.node import N_UNNAMED

KIB, MIB = 1 << 10, 1 << 20
# Inline, one piece, more than a segment, more segments than a lane holds.
CASES = at_length(
    [(n, count) for n in (2, 3, 4, 7) for count in (1, 1000, 5000, 100_003, 1_000_003)],
    [(2, 1), (3, 5000), (7, 5000), (2, 1_000_003), (3, 1_000_003), (7, 300_007)],
)
BUFFERS = ["private", "registered", "mixed"]


@pytest.fixture(autouse=True)
def on_one_node(monkeypatch):
    monkeypatch.setattr("harness.wire", "node")


def array(buffers, rank, count, dtype=np.float32):
    is_registered = buffers == "registered" or (buffers == "mixed" and rank % 2)
    x = rc.empty(count, dtype) if is_registered else np.empty(count, dtype)
    x[:] = whole_numbers(rank, count)
    return x


@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_allreduce_in_place_is_exact_again_and_again(size, count, buffers):
    def body(rank):
        x = array(buffers, rank, count)
        for turn in range(4):
            x[:] = whole_numbers(rank, count, turn=turn)
            rc.allreduce_(x)
            np.testing.assert_array_equal(x, total(size, count, turn=turn))

    run_ranks(size, body)


@pytest.mark.parametrize(("size", "count"), CASES)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_the_other_collectives_are_exact(size, count, buffers):
    def body(rank):
        x = array(buffers, rank, count)
        np.testing.assert_array_equal(rc.allreduce(x), total(size, count))
        own = np.array_split(total(size, count), size)[rank]
        np.testing.assert_array_equal(rc.reduce_scatter(x), own)
        everything = np.concatenate([whole_numbers(r, count) for r in range(size)])
        np.testing.assert_array_equal(rc.allgather(x), everything)
        np.testing.assert_array_equal(rc.broadcast(x, size - 1), whole_numbers(size - 1, count))
        reduced = rc.reduce(x, root=size - 1)
        gathered = rc.gather(x, 0)
        part = np.array_split(whole_numbers(0, count), size)[rank]
        np.testing.assert_array_equal(rc.scatter(x if rank == 0 else None, 0), part)
        splits = [len(each) for each in np.array_split(x, size)]
        parts = [np.array_split(whole_numbers(r, count), size)[rank] for r in range(size)]
        np.testing.assert_array_equal(rc.alltoall(x, splits), np.concatenate(parts))
        if rank == size - 1:
            np.testing.assert_array_equal(reduced, total(size, count))
        if rank == 0:
            np.testing.assert_array_equal(gathered, everything)
        np.testing.assert_array_equal(x, whole_numbers(rank, count))

    read_memory = int(buffers != "mixed" or size % 2 == 0)  # private arrays pass through lanes else
    run_ranks(size, body, settings=Settings(timeout_s=DEADLINE_S, read_memory=read_memory))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_bits_are_the_same_for_any_buffer_and_any_size_of_message(dtype):
    data = np.random.default_rng(1).standard_normal((3, 40_000)).astype(dtype)

    def body(rank):
        private, registered = data[rank].copy(), rc.empty(40_000, np.dtype(dtype))
        registered[:] = data[rank]
        rc.allreduce_(private)
        rc.allreduce_(registered)
        for begin in range(0, 40_000, 1000):
            rc.allreduce_(small := data[rank, begin : begin + 1000].copy())
            assert small.tobytes() == private[begin : begin + 1000].tobytes()
        assert registered.tobytes() == private.tobytes()
        return private.tobytes()

    assert len(set(run_ranks(3, body))) == 1


def test_slices_of_a_registered_array_are_reduced_where_they_stand():
    def body(rank):
        x = rc.zeros((4, 350_000), "float32")  # several pieces per slice
        x[1:3] = whole_numbers(rank, 700_000).reshape(2, -1)
        used = rc.node_memory().highest
        rc.allreduce_(x[1:3])
        assert rc.node_memory().highest == used  # no lane was needed
        np.testing.assert_array_equal(x[1:3].ravel(), total(2, 700_000))
        assert not x[[0, 3]].any()

    run_ranks(2, body)


@pytest.mark.parametrize("is_async", [False, True])
def test_more_operations_in_flight_than_slots(is_async):
    n = 3 * N_UNNAMED + 5

    def body(rank):
        xs = [whole_numbers(rank, 400_000, turn=i % 7) for i in range(n)]
        if is_async:
            for handle in reversed([rc.allreduce_async_(x) for x in xs]):
                handle.wait()
        else:
            for x in xs:
                rc.allreduce_(x)
        for i, x in enumerate(xs):
            np.testing.assert_array_equal(x, total(2, 400_000, turn=i % 7))

    run_ranks(2, body)


def test_names_in_any_order_move_beside_each_other():
    names = [f"layer {i}" for i in range(40)]

    def body(rank):
        for step in range(3):
            xs = {name: whole_numbers(rank, 3000, turn=k + step) for k, name in enumerate(names)}
            order = np.random.default_rng([rank, step]).permutation(names)
            for handle in [rc.allreduce_async_(xs[name], name=name) for name in order]:
                handle.wait()
            for k, name in enumerate(names):
                np.testing.assert_array_equal(xs[name], total(2, 3000, turn=k + step))

    run_ranks(2, body)


def test_groups_of_one_node_work_side_by_side():
    def body(rank):
        group = rc.Group([0, 1]) if rank < 2 else rc.Group([2, 3])
        odd = rc.Group([1, 3]) if rank % 2 else rc.Group([0, 2])
        for i in range(20):
            for members in (odd, group):
                x = whole_numbers(rank, 9000, turn=i)
                wanted = sum(whole_numbers(r, 9000, turn=i) for r in members.ranks)
                np.testing.assert_array_equal(rc.allreduce(x, group=members), wanted)

    run_ranks(4, body)


def test_groups_over_two_nodes_use_messages():
    def body(rank):
        assert rc.Group([0, 2]).team is None if rank in (0, 2) else True
        assert engine().groups.default.team is None
        pair = rc.Group([0, 1]) if rank < 2 else rc.Group([2, 3])
        assert pair.team is not None
        x = whole_numbers(rank, 5000)
        np.testing.assert_array_equal(rc.allreduce(x), total(4, 5000))
        wanted = sum(whole_numbers(r, 5000) for r in pair.ranks)
        np.testing.assert_array_equal(rc.allreduce(x, group=pair), wanted)

    run_ranks(4, body, hub=LoopbackHub(4, (0, 0, 2, 2)))


@pytest.mark.parametrize("name", [None, "w"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_mismatch_touches_nothing_and_the_engine_works_on(name, is_async):
    def body(rank):
        x = rc.zeros(20_000, np.float32)
        for _ in range(3):  # the short way, and a name that was agreed on
            rc.allreduce_(x, name=name)
        x[:] = rank + 1
        wrong = x if rank == 0 else x[:10_000]
        with pytest.raises(rc.MismatchError, match=r"\(20000,\).*\(10000,\).*Nothing was sent"):
            rc.allreduce_async_(wrong, name=name).wait() if is_async else rc.allreduce_(
                wrong, name=name
            )
        assert (x == rank + 1).all()
        rc.allreduce_(x, name=name)
        assert (x == 3).all()

    run_ranks(2, body)


def test_an_argument_that_one_rank_cannot_use_is_a_mismatch_on_all():
    def body(rank):
        x = np.zeros(10, np.float32)
        rc.allreduce_(x)
        with pytest.raises(rc.MismatchError, match="cannot communicate"):
            rc.allreduce_(x if rank else "x")
        rc.allreduce_(x)

    run_ranks(2, body)


def test_a_late_rank_is_waited_for():
    def body(rank):
        x = np.full(50_000, 1, np.float32)
        rc.allreduce_(x)
        if rank == 1:
            time.sleep(0.05)  # late on purpose: more than the moment that the short way waits
        rc.allreduce_(x)
        assert (x == 4).all()

    run_ranks(2, body)


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_death_in_the_middle_is_named_at_once(buffers):
    hub = LoopbackHub(3, (0, 0, 0))

    def body(rank):
        x = array(buffers, rank, 300_000)
        rc.allreduce_(x)
        if rank == 2:
            hub.kill(2, "was killed")
            return None
        start = time.monotonic()
        with pytest.raises(rc.PeerFailedError, match="rank 2 was killed"):
            rc.allreduce_(x)
        return time.monotonic() - start

    times = run_ranks(3, body, hub=hub)
    assert max(times[:2]) < DEADLINE_S / 2


def test_a_rank_that_left_is_not_waited_for():
    def body(rank):
        rc.barrier()
        if rank == 1:
            leave(engine(), "left early")
            return
        rc.allreduce_(np.zeros(10))

    start = time.monotonic()
    error = outcomes(2, body)[0]
    assert isinstance(error, rc.PeerFailedError)
    assert "rank 1 left early" in str(error)
    assert time.monotonic() - start < 10  # without a word of it: half a minute


@pytest.mark.parametrize("faults", [None, {r: Faults() for r in range(4)}], ids=["C++", "Python"])
def test_after_many_bad_calls_on_one_rank_ranks_of_two_hosts_take_turns_again(faults):
    def body(rank):
        for _ in range(N_UNNAMED + 1):
            with pytest.raises(rc.MismatchError):
                rc.allreduce(np.full(3, "text") if rank == 1 else np.ones(3))
        return rc.allreduce(np.ones(3)).tolist()

    hub = LoopbackHub(4, (0, 0, 2, 2))
    assert run_ranks(4, body, hub=hub, faults=faults) == [[4.0] * 3] * 4


def test_the_deadline_names_the_missing_rank():
    def body(rank):
        rc.barrier()
        if rank == 0:
            with pytest.raises(rc.CommTimeoutError) as caught:
                rc.allreduce_(np.zeros(10))
            assert caught.value.missing == (1,)

    outcomes(2, body, settings=Settings(timeout_s=0.3))


@pytest.mark.long
def test_memory_is_used_again_and_given_back():
    def body(rank):
        x = np.zeros(4 * MIB, np.uint8)
        for _ in range(10):
            rc.allreduce_(x)
        first = rc.node_memory()
        for _ in range(at_length(200, 40)):
            rc.allreduce_(x)
            rc.allreduce(rc.zeros(MIB, np.uint8))
        assert rc.node_memory().in_use <= first.in_use + 2 * MIB
        for n, kept in [(3, 120), (8, 0)]:  # what a step needs stays for the next, within reason
            large = [rc.zeros(40 * MIB, np.uint8) for _ in range(n)]
            assert rc.node_memory().in_use >= n * 40 * MIB
            large.clear()
            after = rc.node_memory()
            assert after.in_use <= first.in_use + 2 * MIB
            assert kept * MIB <= after.kept <= 256 * MIB

    run_ranks(2, body)


def test_a_view_keeps_a_registered_array_alive():
    def body(rank):
        view = rc.zeros((100, 100), np.int64)[3:5]
        before = rc.node_memory().in_use
        others = [rc.zeros(MIB, np.uint8) for _ in range(4)]
        for other in others:
            other.fill(255)
        assert not view.any()
        del others, other
        assert rc.node_memory().in_use == before
        del view
        assert rc.node_memory().in_use == before - 80_000 // 4096 * 4096 - 4096

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((-1, "float32"), ValueError),
        ((3, "O"), TypeError),
        ((3, "no such type"), TypeError),
        ((1.5, "float32"), TypeError),
    ],
)
def test_bad_arrays_are_refused(arguments, error):
    def body(_):
        with pytest.raises(error):
            rc.empty(*arguments)

    run_ranks(2, body)


def test_no_more_memory_than_there_is_is_an_error():
    def body(_):
        with pytest.raises(MemoryError):
            rc.empty(1 << 45, "uint8")

    run_ranks(2, body)


@pytest.mark.parametrize("size", [1, 2])
def test_registered_arrays_have_the_shape_and_dtype_that_was_asked_for(size):
    def body(_):
        for shape, dtype in (
            ((3, 4), "int16"),
            (5, np.complex64),
            ((), "bool"),
            ((0, 2), "bfloat16"),
        ):
            x = rc.zeros(shape, dtype)
            assert x.shape == (shape if isinstance(shape, tuple) else (shape,))
            assert str(x.dtype) == np.dtype(dtype).name if dtype != "bfloat16" else "bfloat16"
            assert not np.ascontiguousarray(x).view(np.uint8).any()

    run_ranks(size, body)


def test_errors_of_a_group_over_two_nodes_free_their_slots():
    def body(rank):
        for _ in range(N_UNNAMED + 2):  # each takes its turn in a slot of the node
            with pytest.raises(ValueError, match="root is 99"):
                rc.broadcast(np.zeros(3), root=99)
        assert (rc.allreduce(np.ones(3)) == 4).all()

    run_ranks(4, body, hub=LoopbackHub(4, (0, 0, 2, 2)))


@pytest.mark.parametrize("shape", [1 << 50, (1 << 40, 1 << 40)])
def test_an_array_larger_than_the_machine_is_a_memory_error_that_says_so(shape):
    def body(_rank):
        with pytest.raises(MemoryError, match=r"no room for [0-9]{16,} bytes"):
            rc.empty(shape, "f8")
        assert rc.zeros(np.array([2, 3]), "f4").shape == (2, 3)

    run_ranks(2, body, hub=LoopbackHub(2, (0, 0)))


def test_what_a_fork_writes_into_registered_memory_is_its_own():
    def body(rank):
        x = rc.zeros(3 * 4096, np.uint8)
        x.fill(7)
        if rank == 0:
            child = os.fork()
            if child == 0:
                found = bytes(x)
                x.fill(9)
                os._exit(0 if found == b"\7" * x.size and (x == 9).all() else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert (x == 7).all()
        assert (rc.allreduce(x) == 14).all()

    run_ranks(2, body, hub=LoopbackHub(2, (0, 0)))


def in_core_dumps(pattern):
    """Return what this process has mapped of such memfds that a core dump of it would write."""
    areas = re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    found = [area for area in areas if re.search(f"/memfd:{pattern}", area)]
    assert found, f"no memfd {pattern} is mapped"
    return [area for area in found if " dd " not in area.partition("VmFlags:")[2]]


def test_no_core_dump_allocates_the_arenas_of_the_node():
    def body(rank):
        x = rc.zeros(1000, np.float32)
        rc.allreduce(x)
        rc.allreduce(x, group=rc.Group(range(3)))
        rc.barrier()
        if rank == 0:
            assert in_core_dumps("ringcomm-(arena|board)") == []
            child = os.fork()
            if child == 0:
                os._exit(len(in_core_dumps("ringcomm-arena")))
            assert os.waitpid(child, 0)[1] == 0
        rc.barrier()

    run_ranks(3, body)


def test_a_fork_lets_go_of_what_a_thread_of_its_parent_drives():
    tasks = Path("/proc/self/task")
    others = set(os.listdir(tasks))
    loop = _core.Loop(None, is_crowded=True)
    loop.start_thread()
    (thread,) = set(os.listdir(tasks)) - others
    wait_until(lambda: " S " in (tasks / thread / "stat").read_text(), "its thread does not sleep")
    child = os.fork()
    if child == 0:
        del loop
        os._exit(0)
    try:
        wait_until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0), "the fork hangs", 5)
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise


def test_a_fork_neither_takes_nor_frees_registered_memory():
    def body(rank):
        x = rc.zeros(80 * MIB, np.uint8)
        x.fill(7)
        if rank == 0:
            child = os.fork()
            if child == 0:
                del x
                try:
                    rc.empty(10, np.uint8)
                except rc.NotInitializedError:
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            assert (x == 7).all()

    run_ranks(1, body, hub=LoopbackHub(2, (0, 0)))
