"""The list of events: one line for each, in the order of time, and no main one left out."""

import json

import pytest

from ringcomm.launch.dashboard.event_list import (
    OTHERS,
    Event,
    deaths,
    end_event,
    listed,
    parse_event,
)
from ringcomm.launch.job.records import RunEnd, parse_guardian_file


def line(**said):
    return json.dumps({"time": 5.0, "kind": "note", "step": 3, "text": "x"} | said).encode()


def test_a_line_of_a_rank_is_an_event():
    assert parse_event(line(kind="stall"), 2) == Event(5.0, "stall", "x", (2,), 3)
    assert parse_event(line(step=-1), 2).step is None
    assert parse_event(line(text="a\x1b[2Jb\nc"), 0).text == "a [2Jb c"
    assert len(parse_event(line(text="y" * 9000), 0).text) == 2000


@pytest.mark.parametrize(
    "data", [b"", b"{", b"3", b"[]", b"\xff", line(time="now"), line(kind=3), line(text=None)]
)
def test_what_is_no_event_is_left_out(data):
    assert parse_event(data, 0) is None


def test_ranks_that_tell_of_the_same_event_share_a_line():
    told = [Event(10.0 + rank, "stall", "waits for rank 3", (rank,), 7) for rank in (2, 0, 1)]
    later = Event(90.0, "stall", "waits for rank 3", (0,), 9)
    assert listed([later, *told]) == [
        Event(10.0, "stall", "waits for rank 3", (0, 1, 2), 7),
        later,
    ]


def test_events_are_in_the_order_of_time_and_each_has_a_step_where_one_is_known():
    death = Event(2.0, "death", "killed", (1,))
    recovery = Event(3.0, "recovery", "goes on", (0,), 40)
    spare = Event(4.0, "spare", "takes a place", (4,), 0)
    found = listed([spare, recovery, death])
    assert [(each.kind, each.step) for each in found] == [
        ("death", 40),
        ("recovery", 40),
        ("spare", 40),
    ]


def test_many_notes_push_no_main_event_out():
    notes = [Event(100.0 + i, "note", f"n {i}", (0,), i) for i in range(3 * OTHERS)]
    found = listed([Event(1.0, "death", "killed", (1,)), *notes])
    assert found[0].kind == "death"
    assert (len(found), found[-1].text) == (OTHERS + 1, notes[-1].text)


def test_a_death_is_what_a_guardian_has_recorded():
    text = b"x rank 2 was killed by SIGKILL\n  waiting: rank 0"
    data = b"watches 7\nreport 2 137 killed 5000000000 %d\n%s" % (len(text), text)
    outside = b"report -1 143 asked 6000000000 0\n"
    files = [parse_guardian_file(data), parse_guardian_file(outside)]
    found = deaths(files, lambda *at: {(2, 5.0): 40}[at])
    assert found == [Event(5.0, "death", "rank 2 was killed by SIGKILL", (2,), 40)]


@pytest.mark.parametrize(("logged", "step"), [(40, 42), (42, 42), (None, 42), (900, 900)])
def test_a_death_has_the_step_of_the_report_where_less_was_logged(logged, step):
    """So it is the same in a live job, whose pages tell, and in one that has ended."""
    text = b"x rank 2 (host vm, pid 7) was killed by SIGKILL (out of memory?) after step 42"
    data = b"watches 7\nreport 2 137 killed 5000000000 %d\n%s" % (len(text), text)
    (found,) = deaths([parse_guardian_file(data)], lambda *_: logged)
    assert found.step == step


def test_the_end_of_a_run_is_an_event():
    end = RunEnd(137, "rank 2 was killed", 2, "", {})
    assert end_event(end, 9.0) == [Event(9.0, "end", "rank 2 was killed - exit 137", (2,))]
    assert end_event(None, None) == []
