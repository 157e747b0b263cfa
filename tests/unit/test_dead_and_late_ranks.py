"""Death, departure and lateness, over ranks as threads: the right error, within its deadline."""

import logging
import re
import threading
import time

import numpy as np
import pytest
from faulty_transport import Faults
from harness import at_length, outcomes, run_ranks, wait_until
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm._core import WireFault
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.engine.progress.deadlines import PROGRAM_ENDED

X = np.ones(1000, np.float32)
COLLECTIVES = {
    "allreduce": lambda: rc.allreduce(X),
    "allreduce 16 bit": lambda: rc.allreduce(X.astype(np.float16)),
    "reduce_scatter": lambda: rc.reduce_scatter(X),
    "allgather": lambda: rc.allgather(X),
    "broadcast": lambda: rc.broadcast(X),
    "broadcast_object": lambda: rc.broadcast_object(1),
    "barrier": rc.barrier,
    "reduce": lambda: rc.reduce(X, root=1),
    "allreduce, deterministic": lambda: rc.allreduce(X, deterministic=True),
    "gather": lambda: rc.gather(X, root=1),
    "scatter": lambda: rc.scatter(X, root=1),
    "alltoall": lambda: rc.alltoall(X[:996]),
    "grouped_allreduce": lambda: rc.grouped_allreduce([X, X]),
    "allgather_object": lambda: rc.allgather_object(1),
    "gather_object": lambda: rc.gather_object(1, root=1),
    "scatter_object": lambda: rc.scatter_object([1] * rc.size(), root=1),
    "named": lambda: rc.allreduce(X, name="w"),
    "in a group": lambda: rc.allreduce(X, group=the_group()),
    "asynchronous": lambda: [h.wait() for h in [rc.allreduce_async(X) for _ in range(3)]],
    "asynchronous, named": lambda: [
        h.wait() for h in [rc.allreduce_async(X, name=f"n{i}") for i in range(3)]
    ],
}


def the_group():
    """All ranks, in another order."""
    mine = engine()
    if not hasattr(mine, "group_of_test"):
        mine.group_of_test = rc.Group(reversed(range(mine.size)))
    return mine.group_of_test


def repeat(call):
    for _ in range(20):
        call()


# All pairs at once, a rank that has all it waits for would not miss what another did not get.
SOON = Settings(timeout_s=0.15, algorithm="ring")


@pytest.mark.parametrize("nth", [0, 1, 2, 3, 5, 6, 8])
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_death_at_any_message_reaches_every_other_rank(collective, nth):
    def body(rank):
        repeat(COLLECTIVES[collective])

    results = outcomes(4, body, faults={2: Faults(die=nth)})
    for rank in (0, 1, 3):
        assert isinstance(results[rank], rc.PeerFailedError), results
        assert results[rank].rank == 2
        words = (
            f"dies at message {nth}|stopped because of it"  # a follower's end may be heard first
        )
        assert re.search(words, results[rank].reason)
    assert f"dies at message {nth}" in str(results[2])  # where another thread met it, in words


@pytest.mark.parametrize("nth", at_length([0, 1, 3, 6], [3]))
@pytest.mark.parametrize("collective", at_length(list(COLLECTIVES), list(COLLECTIVES)[::3]))
def test_a_lost_message_is_a_timeout_everywhere_and_the_engine_says_it_is_unusable(collective, nth):
    def body(rank):
        start = time.monotonic()
        with pytest.raises(rc.CommTimeoutError, match=r"RINGCOMM_TIMEOUT_S=0.15 is over"):
            repeat(COLLECTIVES[collective])
        assert time.monotonic() - start < 60
        with pytest.raises(rc.CommTimeoutError, match="cannot be used any more"):
            rc.barrier()
        return "told"

    assert outcomes(3, body, faults={1: Faults(drop=nth)}, settings=SOON) == ["told"] * 3


def test_without_control_messages_every_rank_still_ends_by_its_own_deadline():
    def body(rank):
        with pytest.raises(rc.CommTimeoutError):
            repeat(lambda: rc.allreduce(X[:996]))  # chunks of one size: the wire sees no gap
        return "over"

    mute = {r: Faults(drop_control=True, drop=3 if r == 1 else -1) for r in range(3)}
    assert outcomes(3, body, faults=mute, settings=SOON) == ["over"] * 3


def answers(rank):
    """One of everything, on values that tell the ranks apart."""
    x = np.arange(12.0).reshape(6, 2) + rank
    results = [
        rc.allreduce(x),
        rc.allreduce(x.astype(np.float16), rc.MAX),
        rc.allreduce(x, deterministic=True),
        rc.reduce(x, root=1),
        rc.broadcast(x, 2),
        rc.reduce_scatter(x),
        rc.allgather(x[:rank]),
        rc.gather(x, 2),
        rc.scatter(x, 1),
        rc.alltoall(x, [1, 2, 3]),
        *rc.grouped_allreduce([x, x[0]]),
    ]
    return [result if result is None else result.tolist() for result in results], (
        rc.allgather_object(rank),
        rc.broadcast_object(rank, 1),
    )


@pytest.mark.parametrize("seed", range(15))
def test_messages_that_overtake_each_other_change_nothing(seed):
    faults = {r: Faults(reorder_seed=3 * seed + r) for r in range(3)}
    assert run_ranks(3, answers, faults=faults) == run_ranks(3, answers)


@pytest.mark.parametrize("nth", range(0, 60, 4))
def test_a_late_message_changes_nothing(nth):
    faults = {1: Faults(delay=nth, delay_s=0.05)}
    assert run_ranks(3, answers, faults=faults) == run_ranks(3, answers)


def test_whoever_waits_for_a_live_rank_hears_of_a_third_s_death():
    """Ranks 0 and 1 wait for each other's next step, not for the dead rank 3."""
    died = threading.Event()

    def body(rank):
        if rank == 3:
            died.set()
            raise RuntimeError("gone")
        died.wait(60)
        rc.allreduce(X)

    results = outcomes(4, body)
    assert [r.rank for r in results[:3]] == [3, 3, 3]


def test_no_nap_follows_the_look_that_ends_an_operation_by_a_death():
    """Such a look takes long, and a nap is 20 times as long as the look before it."""
    waits, naps = threading.Event(), []

    def body(rank):
        if rank == 1:
            waits.wait(60)
            raise ValueError("boom")
        progress = engine().progress
        handle = rc.allreduce_async(X)
        sleep = progress._park

        def park(seconds, **kwargs):
            naps.append(handle.done())
            waits.set()
            sleep(seconds, **kwargs)

        progress._park = park
        with pytest.raises(rc.PeerFailedError):
            handle.wait()

    outcomes(2, body)
    assert naps
    assert not any(naps), naps


def test_two_deaths_at_once_are_one_error_each():
    def body(rank):
        if rank in (1, 3):
            raise RuntimeError(f"rank {rank} gone")
        rc.allreduce(X)

    results = outcomes(5, body)
    for rank in (0, 2, 4):
        assert isinstance(results[rank], rc.PeerFailedError)
        assert results[rank].rank in (1, 3)


def test_a_rank_that_followed_another_is_not_blamed():
    """Rank 0 looks only after ranks 2, 3 have died of rank 1's failure: still rank 1 did it."""
    followers = threading.Barrier(3)

    def body(rank):
        if rank == 1:
            raise ValueError("the cause")
        if rank == 0:
            followers.wait(60)
            time.sleep(0.05)  # not for synchronisation: lets the deaths of 2 and 3 be recorded
        try:
            rc.allreduce(X)
        except rc.PeerFailedError:
            if rank != 0:
                followers.wait(60)
            raise

    assert outcomes(4, body)[0].rank == 1


def test_the_engine_says_that_it_is_unusable():
    def body(rank):
        if rank == 1:
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError):
            rc.allreduce(X)
        with pytest.raises(rc.PeerFailedError, match="boom") as again:
            rc.barrier()
        assert again.value.rank == 1
        return "went on"

    assert outcomes(3, body)[::2] == ["went on", "went on"]


@pytest.mark.long
def test_a_rank_that_computes_answers_that_it_is_in_no_operation():
    def body(rank):
        engine().progress.work_in_background()
        rc.allreduce(X, name="first")
        if rank == 1:
            assert is_told.wait(60)  # Python has the rank; a thread of ours answers
            return
        with pytest.raises(rc.CommTimeoutError, match=r"rank 1 is in no operation"):
            rc.allreduce(X, name="second")
        is_told.set()

    is_told = threading.Event()
    run_ranks(2, body, settings=Settings(timeout_s=1))


def test_who_waits_in_another_operation_itself_is_not_who_is_waited_for(caplog):
    """It may have less of the last operation than this rank, and wait for the same rank."""
    told = r"second.*has waited \S+ s for rank 2, which did not answer .*\(rank 1 is in .*other"

    def body(rank):
        engine().progress.work_in_background()
        if rank == 1:
            other = rc.allreduce_async(X, name="other")
            is_inside.set()
            other.wait()
            return rc.allreduce(X, name="second")
        assert is_inside.wait(60)
        second = rc.allreduce_async(X, name="second") if rank == 0 else None
        wait_until(lambda: re.search(told, caplog.text), lambda: caplog.text, 20)
        rc.allreduce(X, name="other")
        return second.wait() if second else rc.allreduce(X, name="second")

    is_inside = threading.Event()
    run_ranks(3, body, settings=Settings(stall_warning_s=0.5, timeout_s=120))


def test_ranks_in_calls_that_the_other_does_not_make_are_told_how_to_mend_it(caplog):
    """As where one calls hvd.allreduce() under `if rank == 0`, and the other reduces gradients."""

    def body(rank):
        engine().progress.work_in_background()
        with pytest.raises(rc.CommTimeoutError) as told:
            rc.allreduce(X, name="gradients" if rank else None)
        return str(told.value)

    caplog.set_level(logging.WARNING, "ringcomm")
    texts = run_ranks(2, body, settings=Settings(stall_warning_s=0.2, timeout_s=2))
    warnings = [text for text in caplog.messages if "has waited" in text]
    assert len(warnings) == 2, warnings
    for text in warnings + texts:
        assert "make the same calls on every rank. Is one of these within an `if`" in text, text
    assert all(text.endswith("The timeout is RINGCOMM_TIMEOUT_S=2.") for text in warnings), warnings


def test_who_waits_for_many_operations_warns_once(caplog):
    def body(rank):
        if rank == 1:
            wait_until(lambda: "has waited" in caplog.text, "rank 0 does not warn")
        for handle in [rc.allreduce_async(X, name=f"layer{i}") for i in range(30)]:
            handle.wait()

    run_ranks(2, body, settings=Settings(stall_warning_s=0.2, timeout_s=120))
    assert sum("has waited" in text for text in caplog.messages) == 1


def test_the_end_waits_for_ever_but_says_for_whom(caplog):
    def body(rank):
        if rank == 1:
            wait_until(lambda: "have not left: 1." in caplog.text, "rank 0 does not warn")
        return leave(engine(), "done")

    assert run_ranks(2, body, settings=Settings(stall_warning_s=0.3, timeout_s=0.2)) == [True] * 2


@pytest.mark.parametrize("name", [None, "one more"])
def test_departure_is_a_failure_for_who_still_needs_the_rank(name):
    def body(rank):
        if rank == 1:
            rc.allreduce(X)
            return leave(engine(), PROGRAM_ENDED)
        rc.allreduce(X)
        with pytest.raises(
            rc.PeerFailedError, match=r"rank 1 left the job.*call join\(\)"
        ) as caught:
            rc.allreduce(X, name=name)
        assert caught.value.rank == 1
        raise caught.value

    results = outcomes(3, body)
    assert results[1] is False  # not everybody left in order
    assert [type(results[r]) for r in (0, 2)] == [rc.PeerFailedError] * 2, results


def test_who_has_left_is_asked_at_once_and_not_only_at_a_warning_or_the_deadline():
    elapsed = []

    def body(rank):
        rc.allreduce(X)
        if rank == 1:
            return leave(engine(), PROGRAM_ENDED)
        start = time.monotonic()
        try:
            return rc.allreduce(X)
        finally:
            elapsed.append(time.monotonic() - start)

    results = outcomes(3, body, settings=Settings(timeout_s=60, stall_warning_s=0))
    assert [type(results[r]) for r in (0, 2)] == [rc.PeerFailedError] * 2, results
    assert max(elapsed) < 30


def test_departure_is_no_failure_for_the_operation_it_took_part_in():
    """A rank may be out of its last collective, and away, while others are still inside it."""

    def body(rank):
        for _ in range(50):
            rc.allreduce(X)
        return leave(engine(), "done")

    assert run_ranks(4, body) == [True] * 4


class StarvingLoop:
    """Begins a program, then advances nothing of its own accord: its threads get no time."""

    def __init__(self, loop, has_begun):
        self._loop = loop
        self._has_begun = has_begun

    def __getattr__(self, name):
        return getattr(self._loop, name)

    def add(self, program):
        self._loop.add(program)
        self._loop.settle()
        self._has_begun.set()

    def start_thread(self):
        pass

    def park(self, seconds):
        pass

    def await_news(self, seconds):
        pass


class StarvingHub(LoopbackHub):
    def __init__(self):
        super().__init__(2)
        self.has_begun = threading.Event()  # rank 0's program

    def transport(self, rank):
        transport = super().transport(rank)
        if rank == 0:
            transport.loop = StarvingLoop(transport.loop, self.has_begun)
        return transport


def test_a_death_is_no_failure_for_the_operation_whose_part_was_done():
    hub = StarvingHub()

    def body(rank):
        if rank == 1:
            assert hub.has_begun.wait(60)
        x = rc.broadcast_async(np.array([rank]), root=1).wait()
        if rank == 1:
            raise ValueError("boom")
        return x.tolist()

    assert outcomes(2, body, hub=hub)[0] == [1]


def test_leaving_waits_for_the_last_rank_without_a_deadline():
    released = threading.Event()

    def body(rank):
        if rank == 0:
            released.wait(60)
        else:
            threading.Timer(0.6, released.set).start()
        return leave(engine(), "done")

    assert run_ranks(3, body, settings=Settings(timeout_s=0.1)) == [True] * 3


def test_a_death_ends_the_wait_of_a_rank_that_leaves():
    """Whoever survives the death may go on for hours."""
    has_left = threading.Event()

    def body(rank):
        if rank == 1:
            raise ValueError("boom")
        if rank == 2:
            return has_left.wait(60)
        is_clean = leave(engine(), "done")
        has_left.set()
        return is_clean

    results = outcomes(3, body)
    assert results[0] is False
    assert results[2] is True


def test_after_leaving_nothing_can_be_called():
    def body(rank):
        leave(engine(), "done")
        with pytest.raises(rc.NotInitializedError, match="shut down"):
            rc.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize("collective", at_length(list(COLLECTIVES), list(COLLECTIVES)[::3]))
def test_timeout_is_the_same_error_on_all_who_wait_and_names_the_missing(collective):
    over = threading.Barrier(3)

    def body(rank):
        if rank == 2:
            over.wait(120)
            return "never came"
        start = time.monotonic()
        with pytest.raises(rc.CommTimeoutError, match=r"for rank 2, which did not") as caught:
            COLLECTIVES[collective]()
        assert time.monotonic() - start < 60
        over.wait(120)
        return caught.value.missing

    results = run_ranks(3, body, settings=Settings(timeout_s=0.3))
    assert results == [(2,), (2,), "never came"]


def test_a_late_rank_is_told_that_the_others_gave_up():
    over = threading.Barrier(3)

    def body(rank):
        if rank == 2:
            over.wait(120)
        with pytest.raises(rc.CommTimeoutError) as caught:
            rc.allreduce(X, name="w")
        if rank != 2:
            over.wait(120)
        return caught.value.missing, str(caught.value)

    start = time.monotonic()
    settings = Settings(timeout_s=0.3)
    results = run_ranks(3, body, settings=settings)
    assert time.monotonic() - start < 60
    assert {missing for missing, _ in results} == {(2,)}
    assert all("allreduce[w]" in text for _, text in results)


def test_timeout_is_a_timeout_error():
    assert issubclass(rc.CommTimeoutError, TimeoutError)


def test_zero_timeout_waits_for_ever():
    late = threading.Event()

    def body(rank):
        if rank == 1:
            late.wait(60)
        else:
            threading.Timer(0.4, late.set).start()
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body, settings=Settings(timeout_s=0)) == [2.0, 2.0]


def test_a_stalled_wait_is_reported_once_with_the_missing_ranks(caplog):
    warned = threading.Event()

    class Notice(logging.Handler):
        def emit(self, record):
            if "slow" in record.getMessage():  # not of what an earlier test has dropped
                warned.set()

    notice = Notice()
    logging.getLogger("ringcomm").addHandler(notice)

    def body(rank):
        if rank == 1:
            assert warned.wait(60)
            time.sleep(0.2)  # long enough for a second warning, which must not come
        return float(rc.allreduce(np.ones(1), name="slow")[0])

    try:
        with caplog.at_level(logging.WARNING, logger="ringcomm"):
            settings = Settings(stall_warning_s=0.1)
            assert run_ranks(2, body, settings=settings) == [2.0, 2.0]
    finally:
        logging.getLogger("ringcomm").removeHandler(notice)
    # Handles that an earlier test dropped may be collected, and told of, at this moment.
    texts = [text for text in caplog.messages if "nobody waited for" not in text]
    assert len(texts) == 1
    assert "allreduce[slow]: rank 0 has waited" in texts[0]
    assert "for rank 1, which did not" in texts[0]


class FailingHub(LoopbackHub):
    """One rank's data cannot be sent."""

    def __init__(self, size, source, error):
        super().__init__(size)
        self.source, self.error = source, error
        self.has_refused = threading.Event()

    def transport(self, rank):
        made = super().transport(rank)
        if rank == self.source:
            made.runner = None  # through Python, for the error to be raised there
            made.isend = self.refuse
        return made

    def refuse(self, data, dest, tag):
        self.has_refused.set()
        raise self.error("on purpose")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_an_error_in_mid_operation_breaks_the_engine_and_tells_the_others(error):
    def body(rank):
        if rank == 1:
            with pytest.raises(error):
                rc.allreduce(X, name="w")
            with pytest.raises(rc.RingcommError, match=rf"{error.__name__}.*cannot be used"):
                rc.allreduce(X)
            return "interrupted"
        with pytest.raises(rc.PeerFailedError, match=r"rank 1 broke off allreduce\[w\]"):
            rc.allreduce(X, name="w")
        return "told"

    assert outcomes(3, body, hub=FailingHub(3, 1, error)) == ["told", "interrupted", "told"]


def test_a_message_that_the_wire_refuses_is_told_to_all(monkeypatch):
    monkeypatch.setattr("ringcomm.engine.progress.task_set._CONFIRM_S", 0.1)

    def body(rank):
        start = time.monotonic()
        if rank == 1:
            with pytest.raises(rc.RingcommError, match=r"w\]: the wire refused.*on purpose"):
                rc.allreduce(X, name="w")
        else:
            with pytest.raises(rc.PeerFailedError, match=r"rank 1 broke off allreduce\[w\]"):
                rc.allreduce(X, name="w")
        return time.monotonic() - start < 60

    assert outcomes(3, body, hub=FailingHub(3, 1, WireFault)) == [True] * 3


def test_a_death_that_the_wire_notices_first_is_told_as_one():
    hub = FailingHub(2, 0, WireFault)

    def body(rank):
        if rank == 1:
            handle = rc.allreduce_async(X, name="w")
            assert hub.has_refused.wait(60)
            time.sleep(0.1)  # not for synchronisation: news travels slower
            assert not handle.done()
            raise ValueError("boom")
        with pytest.raises(rc.PeerFailedError, match="boom") as caught:
            rc.allreduce(X, name="w")
        return caught.value.rank

    assert outcomes(2, body, hub=hub)[0] == 1


@pytest.mark.long
def test_the_deadline_is_for_a_wait_in_which_nothing_moves():
    """Three waits of 0.45 s: a rank that counted on would give up after 0.5 s, and 0.5 s to ask."""

    def body(rank):
        start = time.monotonic()
        assert rc.allreduce(X).tolist() == [4.0] * len(X)
        return time.monotonic() - start > 1.2

    faults = {rank: Faults(delay=2 + 2 * rank, delay_s=0.45) for rank in range(3)}
    settings = Settings(timeout_s=0.5, algorithm="ring")  # where one wait follows another
    assert any(run_ranks(4, body, faults=faults, settings=settings))


def test_a_failure_in_another_thread_stops_the_wait_of_this_one():
    release = threading.Event()

    def body(rank):
        if rank == 1:
            release.wait(60)
            raise RuntimeError("ends")
        engine().watch.own_failure = "raised ValueError: boom in another thread"
        with pytest.raises(rc.PeerFailedError, match="this rank raised ValueError: boom"):
            rc.allreduce(X)
        release.set()
        return True

    assert outcomes(2, body)[0] is True
