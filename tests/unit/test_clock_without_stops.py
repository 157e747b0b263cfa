"""Deadlines count the time in which a process ran, not that in which it was stopped."""

import logging
import queue
from pathlib import Path

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.progress import clock_without_stops, loop
from ringcomm.engine.progress.clock_without_stops import RunningTime, Standstill
from ringcomm.status.stacks import StackFrame, place_of


def test_pauses_do_not_count_and_short_ones_do():
    running = RunningTime(100.0)
    assert [running.at(now) for now in (100.0, 100.5, 101.4, 111.4, 111.5, 121.5)] == [
        pytest.approx(each) for each in (100.0, 100.5, 101.4, 101.4, 101.5, 101.5)
    ]


def test_a_wait_is_over_after_its_deadline_less_the_pauses_since_its_first_look(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(loop.time, "monotonic", lambda: now[0])
    is_over = loop._or_late(lambda: False, 105.0)
    looks = []
    for now[0] in (103.0, 103.5, 113.5, 114.4, 115.0, 115.1):  # stopped for 10 s
        looks.append(is_over())
    assert looks == [False, False, False, False, True, True]
    is_late = loop._or_late(lambda: False, 105.0)
    assert [is_late(), is_late()] == [False, True], "what is late at its first look gets one poll"


def test_a_standstill_is_one_poll_of_one_driver_and_is_told_once():
    still = Standstill()
    looks = [(0.0, "a", 1), (1.0, "a", 2)]  # it went on
    looks += [(float(now), "a", 2) for now in (2, 3, 4, 5)]  # 4 s in one poll
    looks += [(100.0, "a", 2), (100.1, "a", 2)]  # of 95 s stopped, one may have been none
    assert [still.at(*look) for look in looks] == [0, 0, 0, 0, 0, 0, 5.0, 0]
    assert not any(still.at(float(now), None, 2) for now in range(101, 120))
    assert not any(still.at(float(now), "a" if now % 2 else "b", 2) for now in range(120, 140))


def test_a_rank_whose_mpi_does_not_return_says_so_itself(monkeypatch):
    monkeypatch.setattr(clock_without_stops, "STANDSTILL_S", 0.5)
    blocked, told, transports = queue.SimpleQueue(), [], []

    class Release(logging.Handler):
        def emit(self, record):
            told.append(record.getMessage())
            del transports[0].poll
            blocked.put([])

    def body(rank):
        engine().progress.work_in_background()  # as in a job
        if rank == 0:
            transports.append(engine().transport)
            transports[0].poll = blocked.get  # in C, as a call of MPI is
        return rc.allreduce(np.ones(3), name="w").sum()

    log, handler = logging.getLogger("ringcomm"), Release(level=logging.WARNING)
    log.addHandler(handler)
    try:
        assert run_ranks(2, body) == [6.0, 6.0]
    finally:
        log.removeHandler(handler)
    (text,) = told
    assert text.startswith("rank 0: its own MPI has not returned for "), text


def test_of_a_neighbour_in_mpi_others_say_so():
    user = StackFrame("/home/me/train.py", "7", "step")
    poll = StackFrame(f"{Path(rc.__file__).parent}/transport/mpi.py", "253", "_received")
    park = StackFrame(f"{Path(rc.__file__).parent}/engine/progress/loop.py", "20", "_park")
    assert place_of([poll, park, user]) == "/home/me/train.py:7 in step, inside MPI"
    assert place_of([park, user]) == "/home/me/train.py:7 in step"
    assert place_of([]) == ""
