"""Calls that are made again with the same dtype and shape, in shared memory and by messages."""

import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, product

import numpy as np
import pytest
from harness import DEADLINE_S, at_length, outcomes, run_ranks, torch_or_skip
from loopback import LoopbackHub
from sample_values import whole_numbers

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.core.current_engine import engine, serve_thread
from ringcomm.engine.executors.short_calls import ShortCalls, short_calls_of
from ringcomm.transport.node.steps import AGREE, Meeting
from ringcomm.transport.wire_team import most_brought

pytestmark = pytest.mark.usefixtures("wire")
SIZES = at_length(
    [(n, count) for n in (2, 3, 4, 7) for count in (1, 1000, 5000, 100_003, 1_000_003)],
    [(2, 1), (3, 5000), (7, 1000), (7, 5000), (2, 1_000_003), (3, 250_007), (7, 300_007)],
)


def array(buffers, rank, count, dtype=np.float32):
    is_registered = buffers == "registered" or (buffers == "mixed" and rank % 2)
    x = rc.empty(count, dtype) if is_registered else np.empty(count, dtype)
    x[:] = whole_numbers(rank, count)
    return x


class Named:
    """The collectives, each with a name of its own."""

    def __getattr__(self, kind):
        return partial(getattr(rc, kind), name=kind)


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("buffers", ["private", "registered", "mixed"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_calls_made_again_are_exact_each_time_and_their_results_are_new(
    size, count, buffers, library
):
    convert = torch_or_skip().from_numpy if library == "torch" else lambda x: x
    is_named = (size + count + (buffers == "mixed")) % 2 == 0
    n_turns = 5 if is_named else 4  # short calls from the last but one on
    turns = [[whole_numbers(r, count, turn=turn) for r in range(size)] for turn in range(n_turns)]
    sums = [list(accumulate(values)) for values in turns]  # of the ranks up to each
    together = [np.concatenate(values) for values in turns]

    def body(rank):
        call = Named() if is_named else rc
        x = array(buffers, rank, count)
        root, results = size - 1, []
        for values, up_to, everything in zip(turns, sums, together, strict=True):
            summed = up_to[-1]
            parts = [np.array_split(each, size)[rank] for each in values]
            x[:] = values[rank]
            given = convert(x)
            made = {
                "allreduce": (call.allreduce(given), summed),
                "reduce": (call.reduce(given, root=root), summed if rank == root else None),
                "reduce_scatter": (
                    call.reduce_scatter(given), np.array_split(summed, size)[rank],
                ),
                "allgather": (call.allgather(given), everything),
                "gather": (call.gather(given, root), everything if rank == root else None),
                "scatter": (call.scatter(given if rank == root else None, root), parts[root]),
                "broadcast": (call.broadcast(given, root), values[root]),
                "scan": (call.scan(given), up_to[rank]),
                "exscan": (call.exscan(given), up_to[rank - 1] if rank else np.zeros(count)),
            }  # fmt: skip
            if count % size == 0:
                made["alltoall"] = call.alltoall(given), np.concatenate(parts)
            assert call.barrier() is None
            np.testing.assert_array_equal(x, values[rank])
            results.append(made)
            into = convert(x.copy())
            assert call.broadcast_(into, root) is into
            np.testing.assert_array_equal(into, values[root])
            assert call.reduce_(given, root=root) is given
            np.testing.assert_array_equal(x, summed if rank == root else values[rank])
            into = convert(values[rank].copy())
            np.testing.assert_array_equal(
                call.reduce_scatter_(into), np.array_split(summed, size)[rank]
            )
        for made in results:  # of all turns: no call has written to the result of another
            for kind, (result, wanted) in made.items():
                np.testing.assert_array_equal(result, wanted, kind)

    run_ranks(size, body)


def test_calls_made_again_differ_by_root_operator_dtype_and_shape():
    def body(rank):
        for turn in range(4):
            for root, n, dtype in [(0, 6, np.float32), (1, 6, np.float32), (1, 3, np.int8)]:
                x = np.full((n, 2), 10 * turn + rank + 1, dtype)
                assert (rc.broadcast(x, root) == 10 * turn + root + 1).all()
                assert (rc.allreduce(x, rc.MAX) == 10 * turn + 3).all()
                assert (rc.allreduce(x, rc.MIN) == 10 * turn + 1).all()
                found = rc.gather(x.reshape(-1), root)
                assert (found is None) is (rank != root)
                assert found is None or (found.dtype == dtype and found.shape == (6 * n,))

    run_ranks(3, body)


@pytest.mark.parametrize("count", [3, 5000, 40_000])
def test_a_call_made_again_takes_what_others_bring_if_that_has_changed(count):
    """Another number of rows, and another dtype and shape of what the root scatters."""

    def rows(rank, turn):
        return (rank + turn // 2) % 3 if rank else 2  # rank 0 brings the same each time

    def body(rank):
        for turn in range(6):
            mine = np.full((rows(rank, turn), count), 10.0 * turn + rank)
            all_rows = [rows(r, turn) for r in range(3)]
            values = np.repeat([10.0 * turn + r for r in range(3)], all_rows)
            found = rc.allgather(mine)
            np.testing.assert_array_equal(found, np.repeat(values[:, None], count, axis=1))
            found = rc.gather(mine, 1)
            assert (found is None) is (rank != 1)
            if rank == 1:
                np.testing.assert_array_equal(found[:, -1], values)
            found = rc.alltoall(np.repeat(mine, 3, axis=0))
            np.testing.assert_array_equal(found[:, 0], values)
            dtype = (np.float32, np.int8)[turn // 2 % 2]
            whole = np.arange(3 * count * (1 + turn // 3)).astype(dtype).reshape(3, -1)
            found = rc.scatter(whole if rank == 2 else None, 2)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, whole[rank : rank + 1])

    run_ranks(3, body)


def into(kind, x, *more):
    """Make a call that writes into an array of the caller; return that array."""
    calls, size, is_root = short_calls_of(engine().groups.default), rc.size(), rc.rank() == 0
    if kind == "gather_into":
        out = np.zeros(len(x) * size) if is_root else None
        due = more or (len(x) if is_root else 0,) * size
        calls.run(kind, x, None, 0, into=out, more=due)
        return out
    if kind == "scatter_into":
        out, rows = np.zeros(len(x)), np.stack([x + r for r in range(size)]) if is_root else None
        calls.run(kind, rows, None, 0, into=out, more=(x.dtype.name, x.shape))
        return out
    each = more or (len(x) // size,) * size
    out = np.zeros(sum(each))
    calls.run(kind, x[: len(x) // size * size], into=out, more=(each, (len(x) // size,) * size))
    return out


KNOWN = {
    **{kind: partial(into, kind) for kind in ("gather_into", "scatter_into", "alltoall_into")},
    "allreduce": rc.allreduce,
    "allreduce_": lambda x: rc.allreduce_(x.copy()),
    "reduce": rc.reduce,
    "reduce_scatter": rc.reduce_scatter,
    "allgather": rc.allgather,
    "gather": rc.gather,
    "alltoall": rc.alltoall,
    "broadcast": rc.broadcast,
    "scan": rc.scan,
    "exscan": rc.exscan,
    "barrier": lambda _: rc.barrier(),
    "named": lambda x: rc.allreduce(x, name="sum"),
}


@pytest.mark.parametrize("count", [4, 40_000])
@pytest.mark.parametrize("kind", KNOWN.keys() - {"named"})
def test_other_calls_made_again_are_a_mismatch_that_touches_nothing(kind, count):
    other = "gather" if kind == "allgather" else "allgather"

    label = kind.replace("scatter_into", "scatter")

    def body(rank):
        x = np.full(count, float(rank))
        for each in (kind, other) * 2:
            KNOWN[each](x)
        with pytest.raises(
            rc.MismatchError, match=rf"rank 0 called {label} .*rank 1 called {other}"
        ):
            KNOWN[other if rank else kind](x)
        assert (x == rank).all()
        KNOWN[kind](x)
        return rc.allreduce(x)[-1]

    assert run_ranks(2, body) == [1.0, 1.0]


@pytest.mark.parametrize("count", [4, 40_000])
@pytest.mark.parametrize("kind", ["gather_into", "alltoall_into"])
def test_calls_made_again_into_arrays_are_exact_and_refuse_what_is_not_due_on_all_ranks(
    kind, count
):
    def body(rank):
        texts = []
        for turn in range(6):
            x = np.arange(count) + 10.0 * rank + turn
            out, scattered = into(kind, x), into("scatter_into", x)
            all_x = [x - 10.0 * rank + 10.0 * r for r in range(2)]
            wanted = np.concatenate(all_x)
            if kind == "alltoall_into":
                wanted = np.concatenate([np.array_split(each, 2)[rank] for each in all_x])
            elif rank:
                wanted = None
            np.testing.assert_array_equal(out, wanted)
            np.testing.assert_array_equal(scattered, all_x[0] + rank)
            with pytest.raises(rc.MismatchError, match="rank 1 sends") as caught:
                into(
                    kind, x, *((0, 0) if rank and kind == "gather_into" else due(kind, rank, count))
                )
            texts.append(str(caught.value))
        return texts

    first, second = run_ranks(2, body)
    assert first == second


def due(kind, rank, count):
    """Return how many elements a rank expects of each, where rank 0 is wrong about rank 1."""
    each = count if kind == "gather_into" else count // 2
    return each, each - (rank == 0)


def test_another_call_of_a_name_made_again_is_a_mismatch_on_all_ranks_and_then_agreed_on_anew():
    def body(rank):
        for count in (4, 6):
            for _ in range(4):
                assert rc.allreduce(np.full(count, rank + 1.0), name="n").tolist() == [3.0] * count
            with pytest.raises(rc.MismatchError, match=r"\[n\].*rank 0 sent float64 \(4,\)"):
                rc.allreduce(np.full(4 + rank, 1.0), name="n")
        return rc.allreduce(np.ones(4), name="n").sum()

    assert run_ranks(2, body) == [8.0, 8.0]


def test_a_name_made_again_is_refused_while_an_operation_of_it_is_pending():
    def body(rank):
        x = np.full(4, float(rank))
        for _ in range(4):
            rc.allreduce(x, name="n")
        if rank == 0:
            pending = rc.allreduce_async(x, name="n")
            with pytest.raises(ValueError, match="named 'n' is pending on this rank"):
                rc.allreduce(x, name="n")
            rc.allreduce(x, name="other")
            return pending.wait().sum()
        rc.allreduce(x, name="other")
        return rc.allreduce(x, name="n").sum()

    assert run_ranks(2, body) == [4.0, 4.0]


def test_names_made_again_may_be_called_in_another_order_by_threads_of_another_rank():
    def body(rank):
        mine = engine()

        def call(name, value):
            with serve_thread(mine):
                return rc.allreduce(np.full(3, value + rank), name=name).tolist()

        for _ in range(4):
            assert call("a", 1.0) == [3.0] * 3
            assert call("b", 10.0) == [21.0] * 3
        for turn in range(10):
            if rank:
                assert call("b", 10.0) == [21.0] * 3
                assert call("a", turn) == [2 * turn + 1.0] * 3
                continue
            with ThreadPoolExecutor(2) as threads:
                first = threads.submit(call, "a", turn)
                assert threads.submit(call, "b", 10.0).result(DEADLINE_S) == [21.0] * 3
                assert first.result(DEADLINE_S) == [2 * turn + 1.0] * 3

    run_ranks(2, body)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("count", [300, 30_000])
def test_a_call_made_again_waits_for_a_late_rank_and_hears_of_a_dead_one(kind, count, wire):
    hub = LoopbackHub(3, (0, 0, 0) if wire == "node" else None)
    are_through = threading.Barrier(3)

    def body(rank):
        x = np.full(count, float(rank))
        for _ in range(3):
            first = KNOWN[kind](x)
        if rank == 1:
            time.sleep(0.05)  # late on purpose: more than the moment that the short way waits
        again = KNOWN[kind](x)
        np.testing.assert_array_equal(again, first)
        are_through.wait(DEADLINE_S)
        if rank == 2:
            hub.kill(2, "was killed")
            return
        with pytest.raises(rc.PeerFailedError, match="rank 2 was killed"):
            KNOWN[kind](x)

    run_ranks(3, body, hub=hub)


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("count", [400, 40_000])
def test_the_deadline_of_a_call_made_again_names_the_missing_rank(kind, count):
    def body(rank):
        x = np.full(count, float(rank))
        for _ in range(3):
            KNOWN[kind](x)
        if rank == 0:
            with pytest.raises(rc.CommTimeoutError) as caught:
                KNOWN[kind](x)
            assert caught.value.missing == (1,)

    outcomes(2, body, settings=Settings(timeout_s=0.3))


@pytest.mark.parametrize("last", ["a", "b"])
def test_the_error_of_a_call_made_again_says_its_name(last):
    def body(rank):
        for name in "ab" * 4:
            rc.allreduce(np.ones(4), name=name)
        if rank == 0:
            with pytest.raises(rc.CommTimeoutError, match=rf"allreduce\[{last}\]"):
                rc.allreduce(np.ones(4), name=last)

    outcomes(2, body, settings=Settings(timeout_s=0.3))


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("over", [-16, 0, 1, 16])
def test_a_payload_that_just_fits_and_one_that_does_not_are_the_same_to_the_caller(size, over):
    def body(rank):
        x = np.arange(most_brought(size) + over, dtype=np.uint8) + np.uint8(rank)
        for _ in range(3):
            wanted = sum(np.arange(len(x), dtype=np.uint8) + np.uint8(r) for r in range(size))
            np.testing.assert_array_equal(rc.allreduce(x), wanted.astype(np.uint8))
            found = rc.broadcast_(x.copy(), size - 1)
            np.testing.assert_array_equal(found, x - np.uint8(rank) + np.uint8(size - 1))

    run_ranks(size, body)


ALL = {
    **KNOWN,
    "allreduce_": rc.allreduce_,
    "reduce_": rc.reduce_,
    "reduce_scatter_": rc.reduce_scatter_,
    "broadcast_": rc.broadcast_,
    "scatter": lambda x: rc.scatter(None if rc.rank() else x),
    "read-only": lambda x: rc.broadcast_(x if rc.rank() else frozen(x)),
}


def frozen(x):
    x = x.view()
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("kind", ALL.keys() - {"scan", "exscan"})
def test_a_long_call_made_again_is_not_planned_again(kind, monkeypatch):
    has_begun, plans = threading.Barrier(3), []
    by_plan = ShortCalls._by_plan
    monkeypatch.setattr(ShortCalls, "_by_plan", lambda *a: plans.append(a[1]) or by_plan(*a))

    def body(rank):
        x = np.full(60_000, float(rank))
        for _ in range(3):
            ALL[kind](x)
        has_begun.wait(DEADLINE_S)
        plans.clear()
        has_begun.wait(DEADLINE_S)
        ALL[kind](x)

    run_ranks(3, body)
    assert not plans


def test_an_allreduce_made_again_takes_a_strided_array_and_refuses_one_that_is_read_only():
    def body(rank):
        for _ in range(3):
            rc.allreduce_(x := np.ones(5))
        strided = np.full((5, 2), float(rank))
        assert (rc.allreduce_(strided[:, 0]) == 1).all()
        assert (strided[:, 1] == rank).all()
        with pytest.raises(ValueError, match="read-only"):
            rc.allreduce_(frozen(x))
        assert (rc.allreduce_(x) == 4).all()

    run_ranks(2, body)


def test_a_short_allreduce_is_few_functions_and_instructions_of_python():
    """They are half of its 3 us. It is what is called most often, and grows by little things."""

    def body(rank):
        x, functions, n_instructions = np.ones(256, np.float32), [], 0

        def trace(frame, event, _):
            nonlocal n_instructions
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if event == "call":
                functions.append(frame.f_code.co_name)
            n_instructions += event == "opcode"
            return trace

        for _ in range(3):
            rc.allreduce_(x, rc.MAX)
        found = []
        for _ in range(5):
            functions, n_instructions = [], 0
            sys.settrace(trace)
            rc.allreduce_(x, rc.MAX)
            sys.settrace(None)
            found.append((n_instructions, functions))
        return min(found)

    n_instructions, functions = min(run_ranks(2, body))  # who comes last waits for nobody
    assert len(functions) <= 9, functions
    assert n_instructions <= 240  # of Python 3.11; 3.12 needs fewer, or counts none


def test_a_rank_that_dies_when_all_have_agreed_on_a_long_call_is_named(wire):
    hub, are_in = LoopbackHub(3), threading.Barrier(3)

    def body(rank):
        x = np.full(60_000, float(rank))
        for _ in range(3):
            rc.allreduce_(x)
        are_in.wait(DEADLINE_S)
        if rank == 2:
            group = engine().groups.default
            (known,) = group.short_calls._known.values()
            number = group.ledger.next_place
            where = Meeting(group.wire, number % group.wire.n_slots, known.call.fingerprint)
            assert AGREE.begin(where).drive(DEADLINE_S)
            hub.kill(2, "was killed")
            return
        with pytest.raises(rc.PeerFailedError, match="rank 2 was killed"):
            rc.allreduce_(x)

    if wire == "messages":
        run_ranks(3, body, hub=hub)


@pytest.mark.long
def test_the_deadline_of_a_long_call_made_again_is_for_a_wait_in_which_nothing_moves(
    wire, monkeypatch
):
    """A rank that counted on would give up after 0.5 s, and 0.5 s to ask."""
    monkeypatch.setattr("ringcomm.transport.wire_team._SLOWEST_BPS", math.inf)

    def body(rank):
        x = np.full(500_000, 1.0)  # in pieces, one of which follows another
        if rank == 3:
            engine().groups.default.wire.moment_s = 0.0  # so this rank can go on step by step
        for _ in range(3):
            rc.allreduce_(x, rc.MAX)
        begin = time.monotonic()
        if rank != 3:
            rc.allreduce_(x, rc.MAX)
            return time.monotonic() - begin
        group = engine().groups.default
        (known,) = group.short_calls._known.values()
        place = engine().take_place(group.ledger, group.wire)
        step = known.in_cpp.run(place % group.wire.n_slots, None, x)
        while not step.is_over and time.monotonic() - begin < DEADLINE_S:
            time.sleep(0.6)  # a slow rank
            step.advance()
        return 0.0

    if wire == "messages":
        took = run_ranks(4, body, settings=Settings(timeout_s=0.5))
        assert max(took) > 1.1


@pytest.mark.parametrize("is_named", [False, True])
def test_one_rank_may_bring_more_than_fits_and_the_others_little(is_named):
    """Also if all calls before this one fitted, and again afterwards."""

    def body(rank):
        for turn in range(8):
            rows = [1, 1 + (turn in (3, 4, 6)) * most_brought(3) // 8, 2]
            mine = np.full(rows[rank], 10.0 * turn + rank)
            found = rc.allgather(mine, name="w" if is_named else None)
            values = np.repeat([10.0 * turn + r for r in range(3)], rows)
            np.testing.assert_array_equal(found, values)

    run_ranks(3, body)


def test_ranks_of_two_hosts_with_two_each_and_of_groups_across_them():
    def body(rank):
        across = rc.Group([rank % 2, rank % 2 + 2])
        for turn in range(4):
            for n in (5, 20_000):  # the second one goes through the nodes' memory, in turns
                x = np.full(n, float(rank + turn))
                assert (rc.allreduce(x) == 6 + 4 * turn).all()
                assert (rc.allreduce(x, group=across) == 2 * (rank % 2) + 2 + 2 * turn).all()
                assert (rc.broadcast(x, 3) == 3 + turn).all()
            handles = [rc.allreduce_async(np.full(3, float(i + rank))) for i in range(20)]
            for i, handle in enumerate(handles):
                assert (handle.wait() == 6 + 4 * i).all()

    run_ranks(4, body, hub=LoopbackHub(4, (0, 0, 2, 2)))


@pytest.mark.parametrize("forced", ["ring", "direct"])
def test_a_forced_algorithm_carries_small_payloads_too(forced):
    def body(rank):
        return [rc.allreduce(np.full(3, float(rank))).sum() for _ in range(3)]

    assert run_ranks(3, body, settings=Settings(algorithm=forced)) == [[9.0] * 3] * 3


def test_a_rank_that_dies_between_two_messages_of_a_step_is_named():
    """It has sent the first of its two messages: one other rank has heard of it, two have not."""
    hub, are_in = LoopbackHub(4), threading.Barrier(4)

    def body(rank):
        rc.barrier()
        are_in.wait(DEADLINE_S)
        if rank == 2:
            group = engine().groups.default
            place = group.ledger.next_place
            where = Meeting(group.wire, group.ledger.proposal(group.ledger.unnamed(place)), 0)
            step = AGREE.begin(where)
            step.advance()
            hub.kill(2, "was killed")
            return "dead"
        with pytest.raises(rc.PeerFailedError, match="rank 2 was killed") as caught:
            rc.barrier()
        assert caught.value.rank == 2
        return "told"

    assert run_ranks(4, body, hub=hub) == ["told", "told", "dead", "told"]


def test_a_rank_that_ends_right_after_a_call_has_done_its_part():
    def body(rank):
        for _ in range(3):
            found = rc.allreduce(np.ones(5))
        return found.sum()

    for _ in range(20):  # nothing keeps a rank that is through: its last messages are under way
        assert run_ranks(4, body) == [20.0] * 4


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_where_a_call_writes_is_the_matter_of_that_call_alone(library):
    """The memory of x is the rank's own part of what is written or read, another part, or apart."""
    convert = torch_or_skip().from_numpy if library == "torch" else lambda x: x

    def placed(whole, rank, how):
        parts = whole.reshape(2, -1)
        part = parts[0] if how == "apart" else parts[rank if how == "own" else 1 - rank]
        return part.copy() if how == "apart" else part

    def body(rank):
        run, wrong = short_calls_of(engine().groups.default).run, []
        for n, turns in enumerate(product(("own", "other", "apart"), repeat=3), 1):
            for turn, how in enumerate(turns):
                values = [np.full(n, 10.0 * turn + r, np.float32) for r in range(2)]
                whole = np.full(2 * n, -1, np.float32)
                x = placed(whole, rank, how)
                x[:] = values[rank]
                run("allgather_into", convert(x), into=convert(whole))
                if not np.array_equal(whole, np.concatenate(values)):
                    wrong.append(("allgather_into", turns[: turn + 1]))
                whole = np.concatenate(values) * (rank + 1)
                out = placed(whole, rank, how)
                run("reduce_scatter_into", convert(whole), rc.SUM, into=convert(out))
                if not np.array_equal(out, 3 * values[rank]):
                    wrong.append(("reduce_scatter_into", turns[: turn + 1]))
        return wrong

    assert run_ranks(2, body) == [[], []]
