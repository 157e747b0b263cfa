"""Operations that do not block: many in flight, named ones in any order, handles of all sorts."""

import inspect
import os
import random
import threading
import time

import numpy as np
import pytest
from harness import outcomes, run_ranks, wait_until
from loopback import LoopbackTransport

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core import ledger
from ringcomm.engine.core.current_engine import serve_thread
from ringcomm.engine.core.meet_and_leave import leave, stop
from ringcomm.engine.progress.loop import Progress
from ringcomm.transport.tags import TagLayout

X = np.arange(12.0).reshape(6, 2)
FORMS = {
    "allreduce": lambda f, x: f(x, rc.MAX),
    "allreduce_": lambda f, x: f(x.copy()),
    "reduce": lambda f, x: f(x, root=1),
    "reduce_": lambda f, x: f(x.copy(), root=1),
    "reduce_scatter": lambda f, x: f(x, deterministic=True),
    "reduce_scatter_": lambda f, x: f(x.copy()),
    "allgather": lambda f, x: f(x),
    "gather": lambda f, x: f(x, 1),
    "scatter": lambda f, x: f(x, 2),
    "alltoall": lambda f, x: f(x, [1, 2, 3], return_splits=True),
    "broadcast": lambda f, x: f(x, 2),
    "broadcast_": lambda f, x: f(x.copy(), 1),
    "barrier": lambda f, x: f(),
    "grouped_allreduce": lambda f, x: f([x, x[0]]),
    "grouped_allreduce_": lambda f, x: f([x.copy(), x[0].copy()]),
    "grouped_allgather": lambda f, x: f([x, x[:1]]),
    "grouped_reduce_scatter": lambda f, x: f([x, x[:4]]),
}


def asynchronous(kind):
    return getattr(rc, f"{kind[:-1]}_async_" if kind.endswith("_") else f"{kind}_async")


def plain(result):
    if isinstance(result, list | tuple):
        return [plain(each) for each in result]
    return result.tolist() if isinstance(result, np.ndarray) else result


def poll(is_true, seconds=60):
    """Look until it is so, without waiting for a handle."""
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.mark.parametrize("kind", FORMS)
def test_each_form_returns_what_the_synchronous_one_does(kind):
    def body(rank):
        call = FORMS[kind]
        now = call(getattr(rc, kind), X + rank)
        handle = call(asynchronous(kind), X + rank)
        assert isinstance(handle, rc.Handle)
        return plain(now) == plain(handle.wait())

    assert run_ranks(3, body) == [True] * 3


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(5))
def test_named_operations_start_in_any_order_on_each_rank(size, seed):
    def body(rank):
        order = list(range(20))
        sums = []
        for turn in range(3):  # agreed on in the first, cached in the others
            random.Random(f"{seed} {rank} {turn}").shuffle(order)
            handles = {i: rc.allreduce_async(np.full(i, rank + i), name=f"n{i}") for i in order}
            random.Random(f"{rank} {seed} {turn}").shuffle(order)
            results = {i: handles[i].wait() for i in order}
            sums += [results[i].tolist() for i in range(20)]
        return sums

    ranks = sum(range(size))
    want = [[ranks + size * i] * i for i in range(20)] * 3
    assert run_ranks(size, body) == [want] * size


def test_unnamed_operations_are_matched_by_order_beside_named_ones():
    def body(rank):
        named = [lambda i=i: rc.allreduce_async(np.ones(1) * i, name=f"n{i}") for i in range(5)]
        if rank == 1:
            named.reverse()
        handles = []
        for i, start in enumerate(named):
            handles.append(start())
            handles.append(rc.broadcast_async(np.array([10 * i + rank]), 0))
        unnamed = [h.wait().item() for h in handles[1::2]]
        return unnamed, sorted(h.wait().item() for h in handles[0::2])

    assert run_ranks(2, body) == [([0, 10, 20, 30, 40], [0, 2, 4, 6, 8])] * 2


def test_another_kind_in_an_unnamed_place_is_a_mismatch_of_that_place_alone():
    def body(rank):
        first = rc.allreduce_async(np.ones(1))
        second = rc.barrier_async() if rank else rc.allreduce_async(np.ones(1))
        third = rc.allreduce_async(np.full(1, 2.0))
        with pytest.raises(rc.MismatchError, match="operation #2: rank 0 called allreduce #2"):
            second.wait()
        return first.wait().item(), third.wait().item()

    assert run_ranks(2, body) == [(2.0, 4.0)] * 2


def test_operations_advance_while_nobody_waits():
    started = threading.Barrier(3)

    def body(rank):
        handle = rc.allreduce_async(np.full(1000, rank), name="w")
        started.wait(60)
        poll(handle.done)
        return handle.wait()[0]

    assert run_ranks(3, body) == [3, 3, 3]


def test_done_is_false_while_a_rank_is_missing():
    looked = threading.Event()

    def body(rank):
        if rank == 1:
            assert looked.wait(60)
            return rc.allreduce(np.ones(1), name="w").item()
        handle = rc.allreduce_async(np.ones(1), name="w")
        assert not handle.done()
        assert "pending" in repr(handle)
        looked.set()
        poll(handle.done)
        assert "done" in repr(handle)
        return handle.wait().item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_a_second_enqueue_of_a_pending_name_raises_at_once_and_hurts_nobody():
    refused = threading.Event()

    def body(rank):
        if rank == 1:
            assert refused.wait(60)
        handle = rc.allreduce_async(np.ones(1), name="w")
        if rank == 0:
            with pytest.raises(ValueError, match="'w' is pending on this rank"):
                rc.allreduce_async(np.ones(1), name="w")
            with pytest.raises(ValueError, match="'w' is pending on this rank"):
                rc.barrier(name="w")
            refused.set()
        return handle.wait().item(), rc.allreduce_async(np.ones(1), name="w").wait().item()

    assert run_ranks(2, body) == [(2.0, 2.0)] * 2


def test_one_name_may_be_pending_in_two_groups():
    def body(rank):
        group = rc.Group([0, 1])
        handles = [rc.allreduce_async(np.ones(1), name="w", group=g) for g in (None, group)]
        return [h.wait().item() for h in handles]

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_several_threads_wait_for_handles_of_one_rank_in_any_order():
    def body(rank):
        mine = engine()
        handles = [rc.allreduce_async(np.full(50, i + rank), name=f"n{i}") for i in range(30)]
        results = {}

        def wait_for(indices):
            with serve_thread(mine):
                for i in indices:
                    results.setdefault(i, []).append(handles[i].wait()[0])

        threads = [
            threading.Thread(target=wait_for, args=(order,))
            for order in (range(30), reversed(range(30)), range(0, 30, 3), range(29, -1, -2))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in threads)
        return {i: set(found) for i, found in results.items()}

    assert run_ranks(2, body) == [{i: {2 * i + 1} for i in range(30)}] * 2


def test_threads_may_start_named_operations_at_once():
    def body(rank):
        mine = engine()
        sums = []

        def run(thread):
            with serve_thread(mine):
                for turn in range(10):
                    sums.append(rc.allreduce(np.ones(1) * turn, name=f"{thread} {turn}").item())

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return sorted(sums)

    assert run_ranks(2, body) == [sorted([2.0 * t for t in range(10)] * 4)] * 2


def test_a_handle_that_is_dropped_is_carried_out_all_the_same():
    def body(rank):
        x = np.full(10, 1.0 + rank)
        rc.allreduce_async_(x)
        rc.barrier()
        poll(lambda: x.min() == 3.0)  # then this rank's part is done, too
        return x.tolist()

    assert run_ranks(2, body) == [[3.0] * 10] * 2


def test_leaving_completes_what_was_started_and_handles_outlive_it():
    def body(rank):
        handles = [rc.allreduce_async(np.full(3, i + rank), name=f"n{i}") for i in range(10)]
        assert leave(engine(), "done") is True
        assert all(handle.done() for handle in handles)
        return [handle.wait()[0] for handle in handles]

    assert run_ranks(3, body) == [[3 * i + 3 for i in range(10)]] * 3


def test_what_cannot_be_completed_at_the_end_is_an_error_of_its_handle():
    def body(rank):
        handle = rc.allreduce_async(np.ones(1), name="w") if rank == 0 else None
        is_clean = leave(engine(), "done")
        if handle is not None:
            with pytest.raises(rc.PeerFailedError, match="rank 1 done"):
                handle.wait()
        return is_clean

    assert outcomes(2, body)[0] is False


def test_a_wait_of_its_own_length_names_the_missing_and_leaves_the_engine_usable():
    over = threading.Event()

    def body(rank):
        if rank == 1:
            assert over.wait(60)
        handle = rc.allreduce_async(np.ones(1), name="w")
        if rank == 0:
            with pytest.raises(rc.CommTimeoutError, match=r"w\]: rank 0 has waited 0.1 s") as told:
                handle.wait(0.1)
            assert told.value.missing == (1,)
            assert "still under way, and the engine stays usable" in str(told.value)
            over.set()
        return handle.wait().item(), rc.allreduce(np.ones(1)).item()

    assert run_ranks(2, body) == [(2.0, 2.0)] * 2


@pytest.mark.parametrize("timeout_s", [-1, float("nan")])
def test_a_bad_timeout_is_refused(timeout_s):
    def body(rank):
        handle = rc.barrier_async()
        with pytest.raises(ValueError, match="timeout_s is"):
            handle.wait(timeout_s)
        handle.wait(0.0 + 30)

    run_ranks(2, body)


def test_an_argument_that_is_wrong_everywhere_is_told_by_wait():
    def body(rank):
        handle = rc.allreduce_async("no array")
        with pytest.raises(TypeError, match=r"cannot communicate a builtins\.str"):
            handle.wait()
        with pytest.raises(TypeError):
            handle.wait()
        named = [rc.reduce_async(np.ones(1), root=9, name="w") for _ in range(1)]
        for handle in named:
            with pytest.raises(ValueError, match="root is 9"):
                handle.wait()
        with pytest.raises(ValueError, match="root is 9"):
            rc.reduce(np.ones(1), root=9, name="w")
        return rc.allreduce(np.ones(1), name="w").item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_an_argument_that_is_wrong_on_one_rank_is_a_mismatch_on_all():
    def body(rank):
        handle = rc.allreduce_async([1.0] if rank == 1 else np.ones(1), name="w")
        with pytest.raises(rc.MismatchError, match="rank 1 could not take part: TypeError"):
            handle.wait()
        return rc.allreduce(np.ones(1), name="w").item()

    assert run_ranks(3, body) == [3.0] * 3


STALE = {
    "shape": lambda rank, n: rc.allreduce_async(np.ones(n + 2 * (rank == 1)), name="w"),
    "dtype": lambda rank, n: rc.allreduce_async(np.ones(n, "f4" if rank == 1 else "f8"), name="w"),
    "op": lambda rank, n: rc.allreduce_async(np.ones(n), rc.MAX if rank == 1 else rc.SUM, name="w"),
    "kind": lambda rank, n: rc.barrier_async(name="w") if rank == 1 else STALE["shape"](0, n),
    "argument": lambda rank, n: rc.allreduce_async([1] if rank == 1 else np.ones(n), name="w"),
}
SOON = Settings(timeout_s=10.0)  # ranks that disagree on what is cached wait for each other
LONG = 40_000  # of a name that was agreed on, so many move while the ranks agree


@pytest.mark.parametrize("size", [2, 3, 4, 7])
@pytest.mark.parametrize("case", STALE)
@pytest.mark.parametrize("n", [4, LONG])
def test_a_stale_name_is_poisoned_and_works_again(case, size, n):
    def body(rank):
        for _ in range(3):
            assert rc.allreduce(np.ones(n), name="w")[0] == size
        with pytest.raises(rc.MismatchError, match="rank 1 ") as told:
            STALE[case](rank, n).wait()
        sums = [set(rc.allreduce(np.full(n, 2.0), name="w").tolist()) for _ in range(3)]
        return str(told.value), sums, rc.allreduce(np.ones(1)).item()

    texts, sums, ones = zip(*run_ranks(size, body, settings=SOON), strict=True)
    assert len(set(texts)) == 1
    assert all(each == [{2.0 * size}] * 3 for each in sums)
    assert ones == (size,) * size


def test_a_long_broadcast_of_a_known_name_is_not_over_before_all_have_agreed():
    root_is_out = threading.Event()

    def body(rank):
        x = np.full(LONG, float(rank))
        for _ in range(2):
            rc.broadcast(x, name="w")
        if rank == 1:
            assert not root_is_out.wait(0.3)
        rc.broadcast(x, name="w")
        root_is_out.set()

    run_ranks(2, body)


def test_all_ranks_may_change_a_name_s_call_together():
    def body(rank):
        sums = []
        for count in (3, 3, 5, 5, 3):
            sums.append(rc.allreduce(np.ones(count), name="w").tolist())
        return sums

    assert run_ranks(3, body) == [[[3.0] * n for n in (3, 3, 5, 5, 3)]] * 3


def test_poison_says_that_what_was_to_be_overwritten_is_undefined():
    def body(rank):
        rc.allreduce_(np.ones(4), name="w")
        with pytest.raises(rc.MismatchError) as told:
            rc.allreduce_(np.ones(4 + rank), name="w")
        with pytest.raises(rc.MismatchError) as told_again:
            rc.allreduce_(np.ones(4 + rank), name="w")  # not cached any more: nothing moved
        return str(told.value), str(told_again.value)

    texts = run_ranks(2, body, settings=SOON)
    assert texts[0] == texts[1]
    assert "is undefined now" in texts[0][0]
    assert "is undefined now" not in texts[0][1]


def test_more_names_than_are_cached_are_right_and_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(LoopbackTransport, "tags", TagLayout((1 << 28) - 1, 16, n_streams=64))
    monkeypatch.setattr(ledger, "N_NAMED", 4)

    def body(rank):
        names = [f"n{i}" for i in range(10)]
        results = []
        for turn in range(3):
            random.Random(f"{rank} {turn}").shuffle(names)
            handles = {n: rc.allreduce_async(np.full(3, int(n[1:])), name=n) for n in names}
            results.append([handles[n].wait()[0] for n in sorted(names)])
        return results

    assert run_ranks(2, body) == [[[2 * i for i in range(10)]] * 3] * 2
    assert [r.getMessage().count("names are in use") for r in caplog.records] == [1]


def test_a_death_ends_every_operation_under_way():
    are_late = threading.Barrier(3)

    def body(rank):
        handles = [rc.allreduce_async(np.ones(3), name=f"n{i}") for i in range(5)]
        if rank == 1:
            for handle in handles:
                handle.wait()
            are_late.wait(120)
            raise ValueError("boom")
        for handle in handles:
            handle.wait()
        late = [rc.allreduce_async(np.ones(3), name=f"late{i}") for i in range(5)]
        are_late.wait(120)
        reasons = []
        for handle in reversed(late):
            with pytest.raises(rc.PeerFailedError, match="boom") as caught:
                handle.wait()
            reasons.append(caught.value.rank)
        assert all(handle.done() for handle in late)
        with pytest.raises(rc.PeerFailedError, match="boom"):
            rc.allreduce_async(np.ones(3))
        return reasons

    assert outcomes(3, body)[::2] == [[1] * 5] * 2


def test_a_timeout_ends_every_operation_under_way_with_the_same_error():
    over = threading.Barrier(3)

    def body(rank):
        if rank == 2:
            over.wait(120)
            return None
        handles = [rc.allreduce_async(np.ones(3), name=f"n{i}") for i in range(3)]
        for handle in handles:
            with pytest.raises(rc.CommTimeoutError, match="cannot be used any more"):
                handle.wait()
        over.wait(120)
        return True

    assert run_ranks(3, body, settings=Settings(timeout_s=0.2))[:2] == [True, True]


def test_too_many_pending_operations_are_refused(monkeypatch):
    monkeypatch.setattr(LoopbackTransport, "tags", TagLayout((1 << 28) - 1, 16, n_streams=12))
    refused = threading.Event()

    def body(rank):
        if rank == 1:
            assert refused.wait(60)
        handles = [rc.allreduce_async(np.ones(1)) for _ in range(3)]
        if rank == 0:
            with pytest.raises(rc.RingcommError, match="3 operations are pending on rank 0"):
                rc.barrier_async()
            refused.set()
        return [handle.wait().item() for handle in handles]

    assert run_ranks(2, body) == [[2.0] * 3] * 2


def test_out_of_place_forms_copy_their_argument_at_once():
    start = threading.Barrier(2)

    def body(rank):
        x = np.ones(100)
        handle = rc.allreduce_async(x)
        x[:] = 99
        start.wait(60)
        return handle.wait()[0], x[0]

    assert run_ranks(2, body) == [(2.0, 99.0)] * 2


def test_a_child_process_cannot_wait_for_its_parent_s_handle():
    started = threading.Event()

    def body(rank):
        if rank == 1:
            assert started.wait(60)
            return rc.allreduce(np.ones(1), name="w").item()
        handle = rc.allreduce_async(np.ones(1), name="w")
        child = os.fork()
        if child == 0:
            try:
                handle.wait()
            except rc.NotInitializedError:
                os._exit(7)
            os._exit(1)
        started.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        return handle.wait().item()

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.long
def test_a_cycle_of_blocking_calls_ends_by_the_deadline_with_both_named():
    def body(rank):
        first = rc.Group([0, 1])
        second = rc.Group([0, 1])
        with pytest.raises(rc.CommTimeoutError) as caught:
            rc.barrier(group=first if rank else second)
        return str(caught.value)

    texts = run_ranks(2, body, settings=Settings(timeout_s=0.6))
    assert any("is in barrier #1 of Group([0, 1])" in text for text in texts), texts


def test_a_wire_that_breaks_while_nobody_waits_ends_all_operations(monkeypatch):
    cut = threading.Event()

    def broken():
        raise OSError("the cable was cut")

    def body(rank):
        if rank == 1:
            assert cut.wait(60)
            raise RuntimeError("over")
        handles = [rc.allreduce_async(np.ones(1), name=f"n{i}") for i in range(3)]
        monkeypatch.setattr(engine().watch.transport, "poll", broken)
        poll(handles[0].done)
        for handle in handles:
            with pytest.raises((OSError, rc.RingcommError), match="the cable was cut"):
                handle.wait()
        with pytest.raises(rc.RingcommError, match="broken off by OSError: the cable was cut"):
            rc.barrier()
        cut.set()
        return "told"

    assert outcomes(2, body)[0] == "told"


def test_a_wire_that_breaks_while_somebody_waits_is_told_to_all(monkeypatch):
    def broken():
        raise OSError("the cable was cut")

    def body(rank):
        if rank == 0:
            monkeypatch.setattr(engine().watch.transport, "poll", broken)
            with pytest.raises(OSError, match="the cable was cut"):
                rc.allreduce(np.ones(1), name="w")
            with pytest.raises(rc.RingcommError, match="broken off by OSError: the cable was cut"):
                rc.barrier()
            return "told"
        with pytest.raises(rc.PeerFailedError, match=r"rank 0 broke off allreduce\[w\]: OSError"):
            rc.allreduce(np.ones(1), name="w")
        return "told"

    assert run_ranks(2, body) == ["told", "told"]


@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_while_a_rank_waits_breaks_its_engine_and_tells_the_others(
    is_async, monkeypatch
):
    def body(rank):
        if rank == 0:

            def interrupt(_):
                raise KeyboardInterrupt

            monkeypatch.setattr(engine().watch.transport, "park", interrupt)
            with pytest.raises(KeyboardInterrupt):
                rc.allreduce_async(np.ones(1), name="w").wait() if is_async else rc.allreduce(
                    np.ones(1), name="w"
                )
            with pytest.raises(rc.RingcommError, match=r"KeyboardInterrupt.*cannot be used"):
                rc.barrier()
            return "told"
        with pytest.raises(rc.PeerFailedError, match=r"broke off allreduce\[w\]: Keyboard"):
            rc.barrier()
        return "told"

    monkeypatch.setattr(Progress, "work_in_background", lambda _: None)  # the waiter drives
    assert run_ranks(2, body) == ["told", "told"]


def test_an_interrupt_while_the_background_drives_breaks_the_engine_all_the_same(monkeypatch):
    waiting = threading.Event()

    def body(rank):
        if rank == 1:
            with pytest.raises(rc.PeerFailedError, match="KeyboardInterrupt"):
                rc.barrier()
            return "told"
        handle = rc.allreduce_async(np.ones(1), name="w")

        def interrupt(*_):
            waiting.set()
            raise KeyboardInterrupt

        monkeypatch.setattr(engine().progress._turn, "take", interrupt)  # of rank 0 alone
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
        monkeypatch.undo()
        poll(handle.done)
        with pytest.raises(rc.RingcommError, match="cannot be used"):
            handle.wait()
        return "told"

    def ordered(rank):
        if rank == 1:
            assert waiting.wait(60)
        return body(rank)

    assert run_ranks(2, ordered) == ["told", "told"]


def test_a_rank_that_has_failed_ends_what_is_under_way():
    def body(rank):
        if rank == 1:
            assert stopped.wait(60)
            raise ValueError("over")
        handle = rc.allreduce_async_(np.ones(1), name="w")
        stop(engine())
        with pytest.raises(rc.RingcommError, match="this rank has failed"):
            handle.wait()
        stopped.set()
        return "told"

    stopped = threading.Event()
    assert outcomes(2, body)[0] == "told"


def test_a_death_ends_any_number_of_operations():
    def body(rank):
        if rank == 1:
            assert started.wait(120)
            raise ValueError("boom")
        handles = [rc.allreduce_async(np.ones(1), name=f"n{i}") for i in range(1000)]
        started.set()
        for handle in handles:
            with pytest.raises(rc.PeerFailedError, match="boom"):
                handle.wait()
        return "told"

    started = threading.Event()
    assert outcomes(2, body)[0] == "told"


@pytest.mark.parametrize("name", ["", "x" * 10_000, "\udcff" * 500, "größe/1:2\n"])
def test_any_text_is_a_name(name):
    def body(rank):
        sums = [rc.allreduce(np.ones(1), name=name).item() for _ in range(3)]
        with pytest.raises(rc.MismatchError):
            rc.allreduce(np.ones(1 + rank), name=name)
        return sums

    assert run_ranks(2, body) == [[2.0] * 3] * 2


def test_the_error_of_a_dropped_handle_is_a_warning(caplog):
    def body(rank):
        rc.allreduce_async(np.ones(1 + rank), name="w")
        asked = rc.allreduce_async(np.ones(1 + rank), name="v")
        with pytest.raises(rc.MismatchError):
            asked.wait()
        wait_until(lambda: len(caplog.records) == 2, "a warning of each rank")
        rc.barrier()

    run_ranks(2, body)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert all("nobody waited for an operation that failed: allreduce[w]" in t for t in texts)


def test_a_death_is_logged_once_for_all_dropped_handles(caplog):
    def body(rank):
        if rank == 1:
            assert started.wait(120)
            raise ValueError("boom")
        kept = rc.allreduce_async(np.ones(1), name="kept")
        for i in range(50):
            rc.allreduce_async(np.ones(1), name=f"dropped{i}")
        late = rc.allreduce_async(np.ones(1), name="late")
        started.set()
        with pytest.raises(rc.PeerFailedError, match="boom"):
            kept.wait()
        del late

    started = threading.Event()
    outcomes(2, body)
    texts = [record.getMessage() for record in caplog.records]
    # None if kept.wait() has raised the error before.
    assert len(texts) <= 1
    assert all("nobody waited" in text and "boom" in text for text in texts)


def test_a_look_takes_no_time_and_blames_nobody():
    over = threading.Event()

    def body(rank):
        if rank == 1:
            assert over.wait(60)
        handle = rc.allreduce_async(np.ones(1), name="w")
        if rank == 0:
            with pytest.raises(rc.CommTimeoutError, match=r"w\]: is not over") as told:
                handle.wait(0)
            assert told.value.missing == ()
            over.set()
        return handle.wait().item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_help_of_a_collective_is_complete_by_itself():
    names = [name for name in rc.__all__ if "_async" in name]
    assert len(names) == 19
    for name in names:
        blocking, ours = getattr(rc, name.replace("_async", "")), getattr(rc, name)
        assert "see above" not in blocking.__doc__
        assert ours.__doc__.endswith(blocking.__doc__)
        assert "Handle" in ours.__doc__
        parameters = inspect.signature(blocking).parameters
        assert list(inspect.signature(ours).parameters.values()) == list(parameters.values())
        assert [each for each in parameters if f"\n    {each}: " not in ours.__doc__] == []
