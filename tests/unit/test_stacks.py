"""Stacks of a process: those who ask at once do so one after the other, and share the answer."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from harness import wait_until

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


def ask_at_once(page, monkeypatch, n=8):
    """Let n threads ask while the first has the lock; return the signals, and the answers."""
    sent, found, late, kill, has_lock = [], [], set(), os.kill, stacks._has_lock

    def note_late(fd):
        has_it = has_lock(fd)
        if not has_it:
            late.add(threading.get_ident())
        return has_it

    def kill_once_all_wait(pid, number):
        sent.append(number)
        if len(sent) == 1:
            wait_until(lambda: len(late) == n - 1, "not all ask")
        kill(pid, number)

    with monkeypatch.context() as patch:
        patch.setattr(stacks, "_has_lock", note_late)
        patch.setattr(stacks.os, "kill", kill_once_all_wait)
        asks = [threading.Thread(target=lambda: found.append(stacks_of(page))) for _ in range(n)]
        for each in asks:
            each.start()
        for each in asks:
            each.join()
    return sent, found


def test_who_asks_at_once_gets_the_stacks_for_one_signal(page, monkeypatch):
    """Several signals at once may end a healthy process."""
    monkeypatch.setattr(stacks, "_ANSWER_S", 60)
    sent, found = ask_at_once(page, monkeypatch)
    assert sent == [page["stacks_signal"]]
    assert len(found) == 8
    for text in found:
        assert "waits_here" in {frame.function for frame in main_stack(text, page["main_thread"])}
    assert "waits_here" in stacks_of(page)  # it is asked again


def test_nobody_asks_a_process_that_has_not_answered_yet(page, monkeypatch):
    """Signals would gather, and come all at once."""
    monkeypatch.setattr(stacks, "_ANSWER_S", 0.5)
    stacks_of(page)
    os.kill(page["pid"], signal.SIGSTOP)
    time.sleep(0.6)  # what it has said before is no answer
    sent, found = ask_at_once(page, monkeypatch)
    assert len(sent) == 1
    assert found == [""] * 8


def test_the_last_of_several_texts_has_each_thread_once():
    one = 'Thread 0x0a [loop] (most recent call first):\n  File "a", line 1 in f\n\n'
    two = 'Current thread 0x0b (most recent call first):\n  File "b", line 2 in g\n'
    newer = two.replace("line 2", "line 3")
    assert last_of(one + two + one + newer) == one + newer
    assert last_of(newer) == newer
    assert last_of("line 1 in f\n\n" + two) == two
    assert last_of("") == ""
