"""One thread carries out a rank's operations: it never waits for itself."""

import threading
import time

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.progress import loop
from ringcomm.engine.progress.loop import Progress

SOON_S = 30.0  # longer than any of this takes; a hang lasts longer


class Late(np.ndarray):
    """Knows which threads have waited for it, as a tensor does that a collective is filling."""

    def trigger_wait(self):
        self.waiters.append(threading.get_ident())
        return self.view(np.ndarray)


def late(x, waiters):
    made = np.asarray(x).copy().view(Late)
    made.waiters = waiters
    return made


X = np.arange(12.0).reshape(6, 2)
FORMS = {
    "allreduce": lambda x: rc.allreduce_async(x(), rc.MAX),
    "allreduce_": lambda x: rc.allreduce_async_(x()),
    "reduce": lambda x: rc.reduce_async(x(), root=1),
    "reduce_": lambda x: rc.reduce_async_(x(), root=1),
    "reduce_scatter": lambda x: rc.reduce_scatter_async(x()),
    "reduce_scatter_": lambda x: rc.reduce_scatter_async_(x()),
    "allgather": lambda x: rc.allgather_async(x()),
    "gather": lambda x: rc.gather_async(x(), 1),
    "scatter": lambda x: rc.scatter_async(x(), 1),
    "alltoall": lambda x: rc.alltoall_async(x(), [4, 2]),
    "broadcast": lambda x: rc.broadcast_async(x(), 1),
    "broadcast_": lambda x: rc.broadcast_async_(x(), 1),
    "grouped_allreduce": lambda x: rc.grouped_allreduce_async([x(), x()]),
    "grouped_allreduce_": lambda x: rc.grouped_allreduce_async_([x(), x()]),
    "grouped_allgather": lambda x: rc.grouped_allgather_async([x(), x()]),
    "grouped_reduce_scatter": lambda x: rc.grouped_reduce_scatter_async([x(), x()]),
}


def plain(result):
    if isinstance(result, list | tuple):
        return [plain(each) for each in result]
    return result.tolist() if isinstance(result, np.ndarray) else result


@pytest.mark.parametrize("kind", FORMS)
def test_an_array_that_is_under_way_is_awaited_by_the_caller_before_the_call(kind):
    def body(rank):
        expected = plain(FORMS[kind](lambda: X + rank).wait())
        waiters = []
        handle = FORMS[kind](lambda: late(X + rank, waiters))
        n_arrays = 2 if kind.startswith("grouped") else 1
        assert waiters == [threading.get_ident()] * n_arrays
        assert plain(handle.wait()) == expected
        return True

    assert run_ranks(2, body) == [True] * 2


def test_a_message_that_is_under_way_is_awaited_by_the_caller_before_the_call():
    def body(rank):
        waiters = []
        x, out = late(X + rank, waiters), late(np.zeros_like(X), waiters)
        rc.sendrecv(x, 1 - rank, out, 1 - rank)
        assert waiters == [threading.get_ident()] * 2
        return np.array_equal(out, X + (1 - rank))

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_callback_that_waits_is_refused_at_once(timeout_s):
    is_registered = threading.Event()

    def body(rank):
        if rank == 1:
            assert is_registered.wait(SOON_S)
            rc.allreduce_async(np.ones(1), name="first")
            with pytest.raises(rc.PeerFailedError, match=r"waited for by thread"):
                rc.allreduce(np.ones(1), name="never")
            return "told"
        first = rc.allreduce_async(np.ones(1), name="first")
        second = rc.allreduce_async(np.ones(1), name="second")
        errors = []

        def wait():
            try:
                second.wait(timeout_s)
            except rc.RingcommError as error:
                errors.append(str(error))
                raise

        first.when_done(wait)
        is_registered.set()
        with pytest.raises(rc.RingcommError, match=r"allreduce\[second\]: waited for by thread"):
            second.wait()
        assert len(errors) == 1
        return "told"

    assert run_ranks(2, body) == ["told", "told"]


def test_a_callback_may_look():
    is_registered = threading.Event()

    def body(rank):
        if rank == 1:
            assert is_registered.wait(SOON_S)
            return [rc.allreduce(np.ones(1), name=name).item() for name in ("first", "second")]
        first = rc.allreduce_async(np.ones(1), name="first")
        second = rc.allreduce_async(np.ones(1), name="second")
        seen = []

        def look():
            try:
                second.wait(0)
            except rc.CommTimeoutError:
                seen.append(second.done())

        first.when_done(look)
        is_registered.set()
        sums = [first.wait().item(), second.wait().item()]
        assert seen in ([], [False])  # it may have been over by then
        return sums

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_a_service_that_waits_for_its_own_turn_is_refused():
    class Impatient:
        is_busy = has_news = is_streaming = False

        def poll(self, *, only_news=False):
            engine_of_rank.run_until(lambda: False)
            return False

    engine_of_rank = None

    def body(rank):
        nonlocal engine_of_rank
        engine_of_rank = engine()
        engine().progress.attach(Impatient())
        with pytest.raises(rc.RingcommError, match="waited for by thread"):
            engine().run_until(lambda: False, timeout_s=SOON_S)
        return "told"

    assert run_ranks(1, body) == ["told"]


def test_naps_are_as_long_as_looks_are_costly_whatever_work_and_others_take(monkeypatch):
    def compute(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    class Sluggish:
        is_busy = has_news = is_streaming = False
        n_polls = 0

        def poll(self, *, only_news=False):
            self.n_polls += 1
            if self.n_polls == 2:
                time.sleep(0.1)  # as if others had the core
            else:
                compute(0.05)
            return self.n_polls == 1

    def body(rank):
        service = Sluggish()
        engine().progress.attach(service)
        engine().run_until(lambda: service.n_polls == 4)
        return naps

    naps = []
    monkeypatch.setattr(Progress, "_is_in_cpp", True)  # it naps after every look
    monkeypatch.setattr(Progress, "_park", lambda self, nap_s, *, is_background: naps.append(nap_s))
    [naps] = run_ranks(1, body)
    *_, behind_work, behind_others, behind_look = naps
    assert max(behind_work, behind_others) < 0.5 <= behind_look


def test_naps_stay_short_while_a_long_message_is_under_way(monkeypatch):
    class Streaming:
        is_busy = is_streaming = True
        has_news = False
        n_polls = 0

        def poll(self, *, only_news=False):
            self.n_polls += 1
            self.is_streaming = self.n_polls < 200
            return False

    def body(rank):
        service = Streaming()
        engine().progress.attach(service)
        engine().run_until(lambda: service.n_polls == 300)
        service.is_busy = False
        return naps

    naps = []
    monkeypatch.setattr(loop, "_PASS_SHARE", 1e6)  # each look costs much
    monkeypatch.setattr(Progress, "_park", lambda self, nap_s, *, is_background: naps.append(nap_s))
    [naps] = run_ranks(1, body)
    streaming, after = naps[1:100], naps[-50:]
    assert max(streaming) <= 0.5e-3 < max(after)


def test_a_rank_is_awake_while_its_polls_move_much_of_a_long_message(monkeypatch):
    class Streaming:
        is_busy = is_streaming = True
        has_news = False
        n_polls = 0

        def poll(self, *, only_news=False):
            self.n_polls += 1
            until = time.thread_time() + (1e-3 if self.n_polls < 150 else 0)
            while time.thread_time() < until:  # as MPI, which copies bytes
                pass
            return False

    def body(rank):
        service = services[0]
        engine().progress.attach(service)
        engine().run_until(lambda: service.n_polls == 300)
        service.is_busy = False

    services, slept_at = [Streaming()], []
    monkeypatch.setattr(
        Progress, "_park", lambda *_, is_background: slept_at.append(services[0].n_polls)
    )
    run_ranks(1, body)
    assert min(slept_at) >= 150
