"""What a dead rank has started: the guardian ends it, or says that it runs on."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from guarded_ranks import WAITING
from harness import wait_until

from ringcomm._core import open_pidfd
from ringcomm.status.guardian import Guardian

# The rank starts `child`, says which pid it has, and goes on once it is told to.
BODY = """
import subprocess
def fork():
    return os.fork() or time.sleep(60) or os._exit(0)
def run(*arguments, **options):
    return subprocess.Popen(arguments, **options).pid
marked = os.environ | {{"RINGCOMM_RANK_PROCESS": f"{{os.getpid()}} of this launch"}}
of_another = os.environ | {{"RINGCOMM_RANK_PROCESS": f"{{os.getpid()}}0 of this launch"}}
print({child}, flush=True)
sys.stdin.readline()
{end}
"""
LEAVE = "page.set_state(PageState.LEAVING); page.set_state(PageState.LEFT)"
DIE = "os.kill(os.getpid(), signal.SIGKILL)"
DEAF = 'run("sh", "-c", "trap : TERM; echo ready >&2; while :; do sleep 60; done")'


class Family:
    """A rank that has started a child, and the guardian of both."""

    def __init__(self, rank, *others, grace_s=0.2):
        self.rank = rank
        wards = [each.ward for each in (rank, *others)]
        self.guardian = Guardian(wards, grace_s=grace_s, is_fault_tolerant=False)
        rank.go()
        self.child = int(rank.process.stdout.readline())
        self.pidfd = open_pidfd(self.child)

    def ends_within(self, seconds):
        """Return whether the child does; by its pidfd, for nobody here is its parent."""
        return bool(select.select([self.pidfd], [], [], seconds)[0])

    def close(self):
        if not self.ends_within(0):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.child, signal.SIGKILL)
        os.close(self.pidfd)
        self.rank.process.kill()
        self.guardian.wait()


@pytest.fixture
def family(start_rank):
    started = []

    def start(child, end, *others, leads_group, **options):
        rank = start_rank(0, BODY.format(child=child, end=end), leads_group=leads_group)
        started.append(Family(rank, *others, **options))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.mark.parametrize("end", [DIE, 'raise ValueError("boom")'])
@pytest.mark.parametrize(
    ("child", "leads_group"),
    [
        ("fork()", True),
        ("fork()", False),
        ('run("sleep", "60", env={})', True),
        ('run("sleep", "60", env=marked)', False),
    ],
)
def test_what_a_failed_rank_has_started_ends_with_it(child, leads_group, end, family, capfd):
    one = family(child, end, leads_group=leads_group, grace_s=60)
    one.rank.go()
    assert one.ends_within(120)
    one.rank.end()
    one.guardian.wait()
    assert re.search(
        rf"rank 0 had started, and is ended with it: \S+ {one.child}\n", capfd.readouterr().err
    )


def test_the_child_of_a_rank_whose_pid_begins_alike_is_left(family, capfd):
    one = family('run("sleep", "60", env=of_another)', DIE, leads_group=False, grace_s=60)
    one.rank.go()
    one.guardian.wait()
    assert not one.ends_within(0)
    assert "had started" not in capfd.readouterr().err


def test_what_ignores_sigterm_is_killed(family):
    one = family(DEAF, DIE, leads_group=True)
    assert one.rank.process.stderr.readline() == "ready\n"
    one.rank.go()
    assert one.ends_within(120)


def test_a_stopped_orphan_is_ended(family):
    one = family("fork()", DIE, leads_group=True, grace_s=60)
    os.kill(one.child, signal.SIGSTOP)
    one.rank.go()
    assert one.ends_within(120)


def test_what_has_a_session_of_its_own_is_left_and_named(family, capfd):
    child = 'run("sleep", "60", env=marked, start_new_session=True)'
    one = family(child, DIE, leads_group=True)
    one.rank.go()
    one.guardian.wait()
    assert re.search(
        rf"in a session of its own, and runs on: sleep {one.child}\n", capfd.readouterr().err
    )
    assert not one.ends_within(0)


def test_what_a_rank_that_ended_well_has_started_is_left(family, capfd):
    one = family("fork()", LEAVE, leads_group=True)
    one.rank.go()
    assert one.rank.process.wait(120) == 0
    one.guardian.wait()
    assert not one.ends_within(0)
    assert capfd.readouterr().err == ""


def test_a_job_that_fails_leaves_what_a_rank_that_had_ended_well_has_started(
    family, start_rank, capfd
):
    other = start_rank(1, WAITING, leads_group=True)
    one = family("fork()", LEAVE, other, leads_group=True)
    one.rank.go()
    assert one.rank.process.wait(120) == 0
    other.process.kill()
    one.guardian.wait()
    assert "x rank 1" in capfd.readouterr().err
    assert not one.ends_within(0)


# Its descriptors of the page get all numbers that are free.
WATCHER = """
import sys, time
from ringcomm._core import StatusPage
pages = [StatusPage.look(int(sys.argv[1]), int(sys.argv[2])) for _ in range(50)]
print("ready", flush=True)
time.sleep(60)
"""


def test_who_watches_a_rank_outlives_it(start_rank, capfd):
    rank = start_rank(0, DIE)
    guardian = Guardian([rank.ward], grace_s=60, is_fault_tolerant=False)
    seen = [str(rank.ward.pid), str(rank.ward.page_fd)]
    watcher = subprocess.Popen(
        [sys.executable, "-P", "-c", WATCHER, *seen], stdout=subprocess.PIPE, text=True
    )
    with watcher:
        assert watcher.stdout.readline() == "ready\n"
        rank.go()
        rank.end()
        guardian.wait()
        assert watcher.poll() is None
        watcher.kill()
    assert "had started" not in capfd.readouterr().err


def test_survivors_of_a_fault_are_watched_without_looking_for_orphans_for_ever(start_rank, capfd):
    survivor, lost = start_rank(0, WAITING), start_rank(1, WAITING)
    wards = [survivor.ward, lost.ward]
    guardian = Guardian(wards, grace_s=60, is_fault_tolerant=True)
    lost.process.kill()
    wait_until(lambda: "x rank 1" in capfd.readouterr().err, "no report")
    counts = Path("/proc", str(guardian._process.pid), "io")

    def is_at_rest():
        before = counts.read_text()
        time.sleep(0.3)  # that nothing happens cannot be waited for: it would look 3 times
        return counts.read_text() == before

    wait_until(is_at_rest, "it reads /proc again and again")
    survivor.process.kill()
    survivor.process.wait(120)
    guardian.wait()
