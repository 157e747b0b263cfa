"""Events of a process are on its page, and in its file in the folder of the run."""

import json
import logging
import os

import pytest

from ringcomm._core import StatusPage
from ringcomm.status import run_events
from ringcomm.status.run_events import begin_events, record_event, write_event

LOG = logging.getLogger("ringcomm")


@pytest.fixture
def page(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCOMM_RUN_FOLDER", f"{os.getpid()} {tmp_path}")
    monkeypatch.setattr(run_events, "_page", None)
    page = StatusPage.create("job", "h1", 3, 4, 0, 5)
    begin_events(page)
    yield page
    LOG.removeFilter(run_events._record_warning)


def lines(tmp_path):
    path = tmp_path / "events-3.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_an_event_is_on_the_page_and_in_the_file(page, tmp_path):
    page.log_scalar("loss", 17, 0.5)
    record_event("recovery", "goes on\ud800")
    assert [text for _, text in page.events()] == ["goes on?"]
    (event,) = lines(tmp_path)
    assert (event["kind"], event["step"], event["text"]) == ("recovery", 17, "goes on?")


def test_warnings_of_the_log_are_events_of_the_kind_that_the_call_names(page, tmp_path, caplog):
    LOG.warning("waits for rank %d", 2, extra={"event": "stall"})
    LOG.warning("ulimit is low")
    LOG.info("nothing")
    found = [(each["kind"], each["text"]) for each in lines(tmp_path)]
    assert found == [("stall", "waits for rank 2"), ("warning", "ulimit is low")]
    assert [text for _, text in page.events()] == ["waits for rank 2"]
    assert [each.getMessage() for each in caplog.records][:2] == [text for _, text in found]


def test_a_full_disk_or_a_wrong_text_ends_nobody(page, tmp_path):
    (tmp_path / "events-3.jsonl").symlink_to("/dev/full")
    write_event("note", "x")
    (tmp_path / "events-3.jsonl").unlink()
    record = logging.LogRecord("ringcomm", logging.WARNING, "", 1, "%d", ("x",), None)
    assert run_events._record_warning(record) is True
    assert lines(tmp_path) == []


def test_without_init_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv("RINGCOMM_RUN_FOLDER", f"{os.getpid()} {tmp_path}")
    monkeypatch.setattr(run_events, "_page", None)
    record_event("note", "x")
    assert not [*tmp_path.iterdir()]
