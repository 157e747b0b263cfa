"""Deadlines count the time in which a process ran, not that in which it was stopped."""

import pytest

from ringcomm.engine.progress import loop
from ringcomm.engine.progress.clock_without_stops import RunningTime


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
