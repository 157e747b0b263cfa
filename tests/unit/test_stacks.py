"""Stacks of a process: those who ask at once do so one after the other, and share the answer."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from ringcomm.status import stacks
from ringcomm.status.stacks import last_of, main_stack, stacks_of

CHILD = """
import sys, threading
from ringcomm.status import stacks

class Page:
    def set_stacks(self, fd, number, ident):
        print(fd, number, ident, flush=True)

def waits_here():
    sys.stdin.read()

stacks.offer_stacks(Page())
threading.Thread(target=threading.Event().wait, daemon=True).start()
waits_here()
"""


@pytest.fixture
def page():
    command = [sys.executable, "-P", "-c", CHILD]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            fd, number, ident = map(int, child.stdout.readline().split())
            yield {
                "pid": child.pid, "stacks_fd": fd, "stacks_signal": number, "main_thread": ident
            }  # fmt: skip
        finally:
            child.kill()


def test_who_asks_at_once_gets_the_stacks_for_one_signal(page, monkeypatch):
    """Several signals at once may end a healthy process."""
    sent, found, kill = [], [], os.kill

    def count(pid, number):
        sent.append(number)
        time.sleep(0.05)  # the others ask meanwhile
        kill(pid, number)

    monkeypatch.setattr(stacks, "_FRESH_S", 3600)
    monkeypatch.setattr(stacks.os, "kill", count)
    monkeypatch.setattr(stacks, "_ANSWER_S", 60)
    asks = [threading.Thread(target=lambda: found.append(stacks_of(page))) for _ in range(8)]
    for each in asks:
        each.start()
    for each in asks:
        each.join()
    assert sent == [page["stacks_signal"]]
    assert len(found) == 8
    for text in found:
        assert "waits_here" in {frame.function for frame in main_stack(text, page["main_thread"])}
    monkeypatch.setattr(stacks, "_FRESH_S", 0)
    assert "waits_here" in stacks_of(page)
    assert len(sent) == 2


def test_nobody_asks_a_process_that_has_not_answered_yet(page, monkeypatch):
    """Signals would gather, and come all at once."""
    sent, kill = [], os.kill
    monkeypatch.setattr(stacks.os, "kill", lambda pid, number: (sent.append(1), kill(pid, number)))
    monkeypatch.setattr(stacks, "_ANSWER_S", 0.3)
    kill(page["pid"], signal.SIGSTOP)
    asks = [threading.Thread(target=stacks_of, args=[page]) for _ in range(8)]
    for each in asks:
        each.start()
    for each in asks:
        each.join()
    assert len(sent) <= 4


def test_the_last_of_several_texts_has_each_thread_once():
    one = 'Thread 0x0a [loop] (most recent call first):\n  File "a", line 1 in f\n\n'
    two = 'Current thread 0x0b (most recent call first):\n  File "b", line 2 in g\n'
    newer = two.replace("line 2", "line 3")
    assert last_of(one + two + one + newer) == one + newer
    assert last_of(newer) == newer
    assert last_of("line 1 in f\n\n" + two) == two
    assert last_of("") == ""
