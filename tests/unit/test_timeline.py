"""The Chrome trace: whole lines, balanced slices, the phases of an operation."""

import errno
import json
import logging
import os

import numpy as np
import pytest
from harness import outcomes, run_ranks

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.control.commands import parse
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.engine.control.perform import Answer, perform, refusal
from ringcomm.engine.progress.timeline import PHASES, Timeline, timeline_of
from ringcomm.transport.membership.view import View


def events_of(path):
    """Return the events of a trace that was closed: an array, with an event per line."""
    text = path.read_text()
    events = json.loads(text)
    assert len(text.splitlines()) == len(events) + 2
    return events


def test_each_rank_writes_its_operations_with_their_phases(tmp_path):
    def body(rank):
        rc.allreduce(np.ones((6, 4))[:, ::2], name="w")
        rc.allreduce_(np.ones((6, 4))[:, ::2])
        rc.barrier()
        rc.stop_timeline()
        rc.allgather(np.ones(3))

    run_ranks(3, body, settings=Settings(timeline=str(tmp_path / "trace")))
    for rank in range(3):
        events = events_of(tmp_path / f"trace.{rank}.json")
        assert {event["pid"] for event in events} == {rank}
        begun = [event for event in events if event["ph"] == "B"]
        assert [event["name"] for event in begun] == ["allreduce[w]", "allreduce_ #1", "barrier #2"]
        assert [event["cat"] for event in begun] == ["allreduce", "allreduce_", "barrier"]
        assert [event["args"]["nbytes"] for event in begun] == [96, 96, 0]
        shapes = [event["args"].get("shape") for event in begun]
        assert shapes == ["float64[6, 2]", "float64[6, 2]", None]
        places = [event["args"].get("at", "").rpartition("/")[2] for event in begun]
        first = body.__code__.co_firstlineno
        assert places == ["", f"test_timeline.py:{first + 2}", f"test_timeline.py:{first + 3}"]
        phases = [event["name"] for event in events if event["ph"] == "X"]
        assert set(phases) == set(PHASES)
        assert phases.count("negotiation") == 3


def test_slices_are_balanced_and_phases_lie_inside_them(tmp_path):
    def body(rank):
        rc.start_timeline(str(tmp_path / "trace"))
        for _ in range(5):
            rc.allreduce(np.ones(1000))
        rc.stop_timeline()

    run_ranks(2, body)
    for rank in range(2):
        start, n_inside = None, 0
        for event in events_of(tmp_path / f"trace.{rank}.json")[1:]:
            if event["ph"] == "B":
                assert start is None
                start, n_inside = event["ts"], 0
            elif event["ph"] == "X":
                n_inside += 1
                assert event["ts"] >= start
                last = event["ts"] + event["dur"]
            else:
                assert event["ph"] == "E"
                assert n_inside > 0
                assert event["ts"] >= last
                assert event["args"]["outcome"] == "done"
                start = None
        assert start is None


def test_a_failed_operation_says_so(tmp_path):
    def body(rank):
        if rank == 1:
            raise ValueError("boom")
        rc.allreduce(np.ones(3), name="w")

    outcomes(2, body, settings=Settings(timeline=str(tmp_path / "trace")))
    events = events_of(tmp_path / "trace.0.json")
    assert events[-1]["ph"] == "E"
    assert events[-1]["args"]["outcome"] == "failed"


def test_what_was_not_carried_out_says_so(tmp_path):
    def body(rank):
        with pytest.raises(rc.MismatchError):
            rc.allreduce(np.ones(2 + rank))
        with pytest.raises(TypeError):
            rc.allreduce("no array")
        rc.barrier()

    run_ranks(2, body, settings=Settings(timeline=str(tmp_path / "trace")))
    ends = [e for e in events_of(tmp_path / "trace.1.json") if e["ph"] == "E"]
    assert [e["args"]["outcome"] for e in ends] == ["mismatch", "refused", "done"]


def test_an_event_that_comes_after_the_end_is_not_written(tmp_path):
    timeline = Timeline(str(tmp_path / "trace"), 0)
    lane = timeline.begin("allreduce[w]", 8)
    timeline.close()
    lane.end("done")
    timeline.close()
    assert [event["ph"] for event in events_of(tmp_path / "trace.0.json")] == ["M", "B"]


def test_a_folder_that_is_missing_is_an_error(tmp_path):
    def body(rank):
        with pytest.raises(FileNotFoundError):
            rc.start_timeline(str(tmp_path / "no" / "trace"))
        return float(rc.allreduce(np.ones(1))[0])

    assert run_ranks(2, body) == [2.0, 2.0]


def test_a_full_disk_ends_the_timeline_and_not_the_training(tmp_path, caplog):
    timeline = Timeline(str(tmp_path / "trace"), 0)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, timeline._fd)
    os.close(full)
    with caplog.at_level(logging.WARNING, logger="ringcomm"):
        timeline.begin("allreduce[w]", 8).end("done")
    assert [record.getMessage().count("the timeline ends here") for record in caplog.records] == [1]


def test_ctl_begins_a_timeline_anew_that_a_full_disk_has_ended(tmp_path):
    def may_start():
        command = parse(["timeline", "start"])
        return refusal(command, PROGRAM, engine(), is_paused=False, can_save=False)

    def body(_):
        rc.start_timeline(str(tmp_path / "trace"))
        while_recorded = may_start()
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, engine().pending.timeline._fd)
        os.close(full)
        rc.allreduce(np.ones(1))
        return while_recorded, may_start()

    path = tmp_path / "trace.0.json"
    assert run_ranks(1, body) == [(f"a timeline is recorded already, in {path}", "")]


def test_ctl_leaves_the_timelines_of_single_ranks_as_they_are(tmp_path, monkeypatch):
    def body(rank):
        if rank == 1:
            rc.start_timeline("timeline")
        rc.allreduce(np.ones(1), name="before")
        command, answer = parse(["timeline", "start"]), Answer(1, said.append)
        perform(command, PROGRAM, (), engine(), answer, is_first=rank == 0)
        rc.allreduce(np.ones(1), name="after")

    said = []
    monkeypatch.chdir(tmp_path)
    run_ranks(2, body)
    texts = [(tmp_path / f"timeline.{rank}.json").read_text() for rank in range(2)]
    assert ["before" in text for text in texts] == [False, True]
    assert all("after" in text for text in texts)
    assert all("operations are recorded in timeline." in each for each in said)


@pytest.mark.parametrize("plant", ["symlink_to", "hardlink_to", None])
def test_what_others_have_put_in_its_place_is_replaced(plant, tmp_path):
    precious, path = tmp_path / "precious", tmp_path / "trace.0.json"
    precious.write_text("years of work")
    if plant is None:
        os.mkfifo(path)  # whoever opens it to write waits for a reader
    else:
        getattr(path, plant)(precious)
    Timeline(str(tmp_path / "trace"), 0).close()
    assert [event["ph"] for event in events_of(path)] == ["M"]
    assert precious.read_text() == "years of work"


def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_from_the_start_ends_it_too(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING, logger="ringcomm"):
        timeline = Timeline(str(tmp_path / "trace"), 0)
        timeline.begin("allreduce[w]", 8).end("done")
    assert [record.getMessage().count("the timeline ends here") for record in caplog.records] == [1]


def test_a_file_that_cannot_be_made_ends_no_rank_once_the_job_has_begun(tmp_path, caplog):
    """An error in a later view would end this rank, and in the next one those that are alike."""
    prefix = str(tmp_path / "absent" / "trace")
    with pytest.raises(OSError, match="absent"):
        timeline_of(prefix, 0, View.first(2))
    assert timeline_of(prefix, 0, View(1, (0, 2))) is None
    assert "view 1 has no timeline here" in caplog.text
    assert timeline_of("", 0, View(1, (0, 2))) is None
