"""Nothing that a test starts may outlive it."""

import itertools
import os
import time
from pathlib import Path

import harness
import pytest
from guarded_ranks import Rank

SHM = Path("/dev/shm")


@pytest.fixture(params=["messages", "node"])
def wire(request, monkeypatch):
    """Run a test with ranks on nodes of their own, and again with all on one node."""
    monkeypatch.setattr(harness, "wire", request.param)
    return request.param


@pytest.fixture
def clock(monkeypatch):
    """Let rows age as a test says, and none be evicted that it has not asked for."""
    times = itertools.count(1)
    state = {"now": 0.0}
    state["tick"] = lambda: state.update(now=float(next(times)))
    from ringcomm.ps import hashed

    monkeypatch.setattr(hashed, "now", lambda: state["now"])
    monkeypatch.setattr(hashed, "work_after_push", lambda _: 0)
    return state


@pytest.fixture
def start_rank():
    """Start ranks as real processes, without MPI, and end them."""
    started = []

    def start(rank, body, **options):
        started.append(Rank(rank, body, **options))
        return started[-1]

    yield start
    for rank in started:
        rank.process.kill()
        rank.process.communicate()


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Fail the test that leaves a file in /dev/shm or a guardian behind."""
    if "PMIX_RANK" in os.environ or "PMI_RANK" in os.environ:  # inside a job of test_spmd.py
        yield
        return
    before, others = set(os.listdir(SHM)), set(pids())
    yield
    deadline = time.monotonic() + 60
    left = orphaned_files(before) | orphaned_guardians(others)
    while left:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
        left &= orphaned_files(before) | orphaned_guardians(others)  # others' files come and go


def orphaned_files(before):
    """Return new files of /dev/shm that no process has mapped: jobs beside this one may run."""
    new = set(os.listdir(SHM)) - before
    if not new:
        return new
    mapped = mapped_inodes()  # after the look at what is there: who makes a file maps it then
    return {name for name in new if inode(SHM / name) not in mapped}


def mapped_inodes():
    """Return what of /dev/shm is mapped: by number, for a semaphore was mapped by another name."""
    lines = (line.split() for pid in pids() for line in read(pid, "maps").splitlines())
    return {None} | {int(line[4]) for line in lines if len(line) > 5 and "/dev/shm/" in line[5]}


def inode(path):
    """Return its number; None if it is gone."""
    try:
        return path.stat().st_ino
    except OSError:
        return None


def orphaned_guardians(others):
    """Return new guardians all of whose ranks are gone."""
    found = set()
    for pid in set(pids()) - others:
        program, *arguments = read(pid, "cmdline").split("\0")
        wards = [a.split(":")[0] for a in arguments if a.count(":") in (2, 4)]
        if program.endswith("ringcomm-guardian") and not any(map(is_alive, wards)):
            found.add(f"guardian {pid}")
    return found


def pids():
    return filter(str.isdigit, os.listdir("/proc"))


def is_alive(pid):
    return read(pid, "stat").rpartition(")")[2].split()[:1] not in ([], ["Z"])


def read(pid, name):
    try:
        return Path("/proc", pid, name).read_text(errors="replace")
    except OSError:
        return ""


def pytest_collection_modifyitems(items):
    if harness.is_at_length():
        return
    skipped = pytest.mark.skip(reason="the gate has no time for it; ci/length runs it")
    for item in items:
        if item.get_closest_marker("at_length"):
            item.add_marker(skipped)
