"""How ranks have used their hosts: lines in the folder of a run, and columns of the page."""

import json
import os
import time
from dataclasses import replace

import pytest

from ringcomm._core import StatusPage
from ringcomm.launch.dashboard.use_columns import columns_of
from ringcomm.launch.job import supervisor, use_history
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.use_history import UseHistory
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.rank_rows import Process, use_between


def line(time, **ranks):
    return json.dumps({"time": time, "ranks": ranks}).encode()


@pytest.fixture
def samples():
    """Two samples of a rank, 2 s apart: half a second in operations, and 4 MB of payload."""
    page = StatusPage.create("job-use", "h1", 3, 4, 0, 5)
    ranks = Ranks(sees_gpus=False)
    ranks.search([os.getpid()])
    (before,) = [each for each in ranks.sample(10**9) if each.job == "job-use"]
    before = replace(before, process=Process(1.0, 5000))
    done = {"busy_ns": before.page["busy_ns"] + 5 * 10**8, "ended_nbytes": 4_000_000}
    now = replace(
        before, time_ns=3 * 10**9, page={**before.page, **done}, process=Process(4.0, 7000)
    )
    yield before, now
    del page


def test_use_is_a_rate_between_two_samples(samples):
    before, now = samples
    assert use_between(before, now) == (0.25, 1.5, 7000, 2_000_000)
    assert use_between(before, replace(now, process=None)) == (-1.0, 0.0, 0, 0)


@pytest.mark.parametrize("how_long", ["short", "long"])
def test_a_job_begins_without_what_writes_its_use(how_long, tmp_path, monkeypatch):
    """Its imports would be 3 % of the time that a short one takes."""
    began, made = time.monotonic(), []
    make = supervisor._use_history
    monkeypatch.setattr(
        supervisor, "_use_history", lambda f: made.append(time.monotonic() - began) or make(f)
    )
    if how_long == "long":
        monkeypatch.setattr(supervisor, "_USE_AFTER_S", 0.2)
    folder = RunFolder(tmp_path / "run")
    assert folder.claim()
    argv = ["sh", "-c", "sleep 0.5"]
    job = supervisor.Supervisor(argv, {"PATH": os.environ["PATH"]}, folder, size=1, grace_s=1)
    assert not made
    job.run()
    assert len(made) == (how_long == "long")
    assert all(each >= 0.2 for each in made)


def test_lines_come_rarely_and_a_full_disk_ends_them(samples, tmp_path, monkeypatch):
    before, now = samples
    (tmp_path / "run").mkdir()
    history = UseHistory(RunFolder(tmp_path / "run"))
    history.add([before])
    history.add([now])
    text = (tmp_path / "run" / "use.jsonl").read_text()
    assert json.loads(text)["ranks"] == {"3": [0.25, 1.5, 7000, 2_000_000]}
    clock = [history._began + 60_000.0]
    monkeypatch.setattr(use_history.time, "monotonic", lambda: clock[0])
    assert history.is_due
    history.look([])
    clock[0] += 99
    assert not history.is_due
    clock[0] += 1
    assert history.is_due
    (tmp_path / "run" / "use.jsonl").unlink()
    (tmp_path / "run" / "use.jsonl").symlink_to("/dev/full")
    history.add([before])
    history.add([now])
    assert not history.is_due


def test_lines_of_several_hosts_are_one_column():
    one = [line(10.0, **{"0": [0.5, 1, 2, 3]}), line(11.0, **{"0": [0.25, 1, 2, 3]})]
    two = [line(10.4, **{"1": [-1, 0, 0, 0]})]
    assert columns_of([one, two]) == [
        {"time": 10.0, "ranks": {0: [0.5, 1, 2, 3], 1: [-1, 0, 0, 0]}},
        {"time": 11.0, "ranks": {0: [0.25, 1, 2, 3]}},
    ]


def test_a_long_history_is_thinned_and_has_its_end():
    lines = [line(float(i), **{"0": [0, 1, 2, 3]}) for i in range(10_001)]
    found = columns_of([lines], most=100)
    assert 50 < len(found) <= 100
    assert found[-1]["time"] == 10_000.0


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"3", b'{"time": 1}', line("x"), b'{"time": 1, "ranks": {"a": [1,2,3,4]}}'],
)
def test_what_is_no_line_of_a_history_is_left_out(data):
    good = line(1.0, **{"0": [0, 1, 2, 3], "1": [0, 1], "2": "x"})
    assert columns_of([[data, good]]) == [{"time": 1.0, "ranks": {0: [0, 1, 2, 3]}}]
