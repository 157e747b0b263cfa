"""rc.log(): its lines, its steps, and disks that are full."""

import errno
import json
import os
import queue
import sys
import threading
from types import ModuleType

import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api import log_metrics
from ringcomm.launched.child_marks import RUN_FOLDER


@pytest.fixture
def metrics(tmp_path, monkeypatch):
    """The file of rank 0 in the folder of a run to which this process belongs."""
    monkeypatch.setenv(RUN_FOLDER, f"{os.getpid()} {tmp_path}")
    log_metrics._file.cache_clear()
    yield tmp_path / "metrics.jsonl"
    log_metrics._file.cache_clear()


def log_steps(steps):
    def body(_):
        for step in steps:
            rc.log(step=step, loss=0.5)

    run_ranks(1, body)


def test_a_file_that_cannot_be_written_is_one_warning_and_gets_the_steps_after_that(
    metrics, monkeypatch, caplog
):
    write = os.write

    def write_with_little_room(descriptor, data):
        if not data.lstrip().startswith(b'{"time"'):  # somebody else's
            return write(descriptor, data)
        room.append(room.pop() - 1)
        if room[0] == 0:
            return write(descriptor, data[:7])
        if room[0] == -1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    room = [2]  # one whole line, then half a line, then none; then there is room again
    monkeypatch.setattr(log_metrics.os, "write", write_with_little_room)
    log_steps(range(5))
    whole, half, *rest = metrics.read_text().splitlines()
    assert len(half) == 7
    assert [json.loads(line)["step"] for line in (whole, *rest)] == [0, 3, 4]
    (warning,) = [each.getMessage() for each in caplog.records]
    assert f"{metrics} cannot be written: No space left on device" in warning


def test_a_file_that_cannot_be_opened_is_one_warning(metrics, caplog):
    metrics.mkdir()
    log_steps(range(3))
    (warning,) = [each.getMessage() for each in caplog.records]
    assert f"{metrics} cannot be written: Is a directory" in warning


def test_no_job_ends_for_a_name_that_a_line_has_itself(metrics):
    class Tracker:
        def log(self, values, step):
            seen.append((values, step))

    def body(_):
        rc.log_to(Tracker())
        rc.log({"step": 3, "time": 0.25})  # time: of an epoch
        rc.log({"step": 3, "time_": 4}, step=7, time=0.5)
        rc.log({"step": -1.5})
        with pytest.raises(TypeError, match="the name 7 must be a str"):
            rc.log({7: 0.5})
        rc.log({"\ud800": 0.5, "rank": 2})
        rc.log(step=8, of=90, loss=1)
        rc.log({"of": 5}, step=9)
        with pytest.raises(ValueError, match="of is -1"):
            rc.log(of=-1)

    seen = []
    run_ranks(1, body)
    log_metrics._trackers.clear()
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert all(line.pop("time") > 1e9 for line in lines)
    assert lines == [
        {"step": 3, "time_": 0.25},
        {"step": 7, "step_": 3.0, "time_": 4.0, "time__": 0.5},
        {"step_": -1.5},
        {"?": 0.5, "rank": 2.0},
        {"step": 8, "of": 90, "loss": 1.0},
        {"step": 9, "of_": 5.0},
    ]
    assert seen[:2] == [
        ({"time": 0.25}, 3),
        ({"step": 3.0, "time_": 4.0, "time": 0.5}, 7),
    ]


def test_a_folder_that_tensorboard_cannot_write_is_one_warning(tmp_path, monkeypatch, caplog):
    class Writer:
        def add_scalar(self, name, value, step):
            seen.append((name, value, step))
            if len(seen) == 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def open_writer(folder):
        if folder == "file":
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return Writer()

    def body(_):
        for loss in range(5):
            rc.log(loss=loss, step=7 if loss == 1 else None)

    seen = []
    monkeypatch.setattr(log_metrics, "_tensorboard", open_writer)
    monkeypatch.setattr(log_metrics, "_tensorboards", {})
    for folder in ("file", "full"):
        run_ranks(1, body, settings=Settings(tensorboard=folder))
    texts = [each.getMessage() for each in caplog.records]
    assert [text.split(".")[0] for text in texts] == [
        "RINGCOMM_TENSORBOARD=file cannot be written: Not a directory",
        "RINGCOMM_TENSORBOARD=full cannot be written: No space left on device",
    ]
    assert seen == [("loss", 0.0, 0), ("loss", 1.0, 7), ("loss", 2.0, 8)]


def test_a_tracker_on_a_full_disk_is_one_warning(monkeypatch, caplog):
    class Tracker:
        def log(self, values, step):
            seen.append(values)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def body(_):
        rc.log_to(Tracker())
        for loss in range(3):
            rc.log(loss=loss)

    seen = []
    monkeypatch.setattr(log_metrics, "_trackers", [])
    run_ranks(1, body)
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "Tracker, which rc.log_to() was given, lacks" in warning
    assert "No space left on device" in warning
    assert seen == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}]


def test_a_tracker_whose_thread_a_full_disk_has_ended_is_not_waited_for(monkeypatch, caplog):
    """As the SummaryWriter of tensorboardX, whose add_scalar() waits for room in its queue."""

    class EventQueue(queue.Queue):
        def get(self):
            value = super().get()
            if value == 19.0:
                raise EOFError  # closed
            return value

    class Writer:
        def __init__(self):
            self.file_writer = self.event_writer = self
            self._event_queue, self._closed = EventQueue(2), False
            self._worker = threading.Thread(target=self._event_queue.get, daemon=True)
            self._worker.start()

        def add_scalar(self, name, value, step):
            self._event_queue.put(value, timeout=60)

    def body(_):
        rc.log_to(Writer())
        for loss in range(20):
            rc.log(loss=loss)

    monkeypatch.setattr(log_metrics, "_trackers", [])
    run_ranks(1, body)
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "its thread has ended" in warning
    for thread in threading.enumerate():
        if thread.name == "ringcomm-tracker":
            thread.join()


def test_the_writer_of_tensorboardx_waits_for_no_thread_that_a_full_disk_has_ended(
    tmp_path, monkeypatch, caplog
):
    class EventsWriter:
        def __init__(self, file_prefix):
            self.n = 0

        def write_event(self, event):
            self.n += 1
            if self.n > 3:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        def flush(self):
            flushed.append(self.n)

    class SummaryWriter:
        def __init__(self, folder, **_):
            pytest.fail("its thread ends on a full disk, and add_scalar() waits for ever")

    package = "tensorboardX"
    for name, content in {
        "": {"SummaryWriter": SummaryWriter},
        ".event_file_writer": {"EventsWriter": EventsWriter},
        ".proto": {},
        ".proto.event_pb2": {"Event": dict},
        ".record_writer": {"directory_check": os.mkdir},
        ".summary": {"scalar": lambda name, value: (name, value)},
    }.items():
        module = ModuleType(package + name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, package + name, module)
    monkeypatch.setattr(log_metrics, "_tensorboards", {})
    monkeypatch.chdir(tmp_path)
    flushed = []
    run_ranks(
        1, lambda _: [rc.log(loss=0.5) for _ in range(50)], settings=Settings(tensorboard="tb")
    )
    (warning,) = [each.getMessage() for each in caplog.records]
    assert "=tb cannot be written: No space left on device" in warning
    assert (tmp_path / "tb").is_dir()
    assert flushed == [1]  # and then every 5 s
