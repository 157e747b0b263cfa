"""The parts of a status page by which a job is controlled and diagnosed."""

import os
import subprocess
import sys
from itertools import pairwise

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
