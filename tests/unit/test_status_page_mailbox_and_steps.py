"""The parts of a status page by which a job is controlled and diagnosed."""

import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from ringcomm._core import StatusPage, StepClock
from ringcomm.status.page_enums import Mail


@pytest.fixture
def page():
    return StatusPage.create(job="test", host="here", rank=0, size=1, local_rank=0, nonce=7)


def test_a_command_goes_through_the_mailbox_once_and_is_answered(page):
    me, other = os.getpid(), os.getppid()
    assert page.take_mailbox(me)
    assert not page.take_mailbox(other)  # somebody uses it
    page.put_command("set note=ä b")
    assert page.has_command
    assert page.take_command() == "set note=ä b"
    assert page.take_command() == ""
    assert not page.withdraw_command()
    page.answer_command("ok it is so")
    assert (Mail(page.mail), page.answer) == (Mail.ANSWERED, "ok it is so")
    page.give_mailbox_back()
    assert page.take_mailbox(other)
    page.put_command("pause")
    assert page.withdraw_command()
    assert page.take_command() == ""


def test_a_mailbox_is_free_again_when_its_owner_is_dead(page):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert page.take_mailbox(gone.pid)
    assert page.take_mailbox(os.getpid())
    page.give_mailbox_back()
    assert page.take_mailbox(gone.pid)
    page.put_command("pause")
    assert not page.take_mailbox(os.getpid())  # the rank will take the command
    assert page.take_command() == "pause"
    page.answer_command("ok")
    assert page.take_mailbox(os.getpid())


def test_the_parts_of_whole_steps_are_on_the_page(page):
    clock = StepClock()
    for number in range(130):
        if number != 3:
            clock.mark(1)
        for part in (2, 3, 2):  # the first mark of a step counts
            clock.mark(part)
        clock.end(page)
    steps = page.steps()
    assert [number for number, _, _ in steps] == list(range(1, 129))  # one was not whole
    for (_, marks, no_core), (_, later, _) in pairwise(steps):
        assert list(marks) == sorted(marks)
        assert marks[-1] <= later[0]
        assert min(no_core) >= 0
        assert len(no_core) == len(marks) - 1 == 4


WAITS = Path("/proc/thread-self/schedstat")


def without_core_ns():
    """Return how long this thread has waited for a core so far, as Linux counts it."""
    return int(WAITS.read_text().split()[1])


@pytest.mark.skipif(not WAITS.exists(), reason="this kernel does not count waits for a core")
def test_each_wait_for_a_core_is_in_one_part_of_one_step(page):
    before = without_core_ns()
    clock, began = StepClock(), without_core_ns()
    for number in range(20):
        for part in (1, 2, 3):
            clock.mark(part)
            waited = without_core_ns()
            deadline = time.monotonic() + 10
            while number < 2 and without_core_ns() == waited and time.monotonic() < deadline:
                time.sleep(1e-4)  # whoever wakes up waits for a core, if not for long
        ended = without_core_ns()
        clock.end(page)
    noted = sum(sum(no_core) for _, _, no_core in page.steps())
    assert began < ended
    assert ended - began <= noted <= without_core_ns() - before
