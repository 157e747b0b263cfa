"""A stop signal goes to all processes of a job: children of a rank that catches it hold it."""

import contextlib
import os
import select
import signal
import subprocess
import sys

import pytest
from harness import DEADLINE_S

from ringcomm._core import open_pidfd

# A rank, without MPI, that starts a child and obeys what it reads. The child answers if it lives.
RANK = """
import multiprocessing, os, signal, subprocess, sys
from multiprocessing.connection import Connection

started = []  # for its parent, it has ended when a forkserver has

def answer(connection):
    connection.send(os.getpid())
    while True:
        connection.send(connection.recv())

def handle_and_answer(connection):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: connection.send("handled"))
    answer(connection)

def start_one(connection):
    multiprocessing.get_context("fork").Process(target=answer, args=(connection,)).start()
    connection.close()

def start_and_stay(connection):
    start_one(connection)
    signal.pause()

def fork(there):
    if os.fork() == 0:
        answer(there)

def of_multiprocessing(method, target=answer):
    def start(there):
        process = multiprocessing.get_context(method).Process(target=target, args=(there,))
        process.start()
        started.append(process)
    return start

def of_program(there, code="import ringcomm", before=()):
    code += f"; from family import *; answer(Connection({there.fileno()}))"
    folder = os.path.dirname(__file__)
    subprocess.Popen([*before, sys.executable, "-c", code], pass_fds=[there.fileno()], cwd=folder)

def behind_env(there):
    of_program(there, "pass", ["env", "--ignore-signal=USR1"])

KINDS = {
    "os.fork": fork,
    "fork": of_multiprocessing("fork"),
    "spawn": of_multiprocessing("spawn"),
    "forkserver": of_multiprocessing("forkserver"),
    "a fork of a spawned one": of_multiprocessing("spawn", start_and_stay),
    "a program that imports ringcomm": of_program,
    "a program behind env": behind_env,
    "a fork that handles signals": of_multiprocessing("fork", handle_and_answer),
}

if __name__ == "__main__":
    from ringcomm._core import catch_stop_signals, pass_stop_signals_on, release_stop_signals
    from ringcomm.launched.child_marks import mark_children_of_this_rank
    from ringcomm.status.child_signals import let_children_hold
    mark_children_of_this_rank()
    let_children_hold()
    here, there = multiprocessing.Pipe()
    if sys.argv[1] == "a program without ringcomm":
        print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
    else:
        KINDS[sys.argv[1]](there)
        there.close()
        assert here.poll(20)
        print(pid := here.recv(), flush=True)
    for line in sys.stdin:
        if line == "ask\\n":
            here.send("lives")
            answered = here.recv() if here.poll(20) else "silent"
            print(answered if all(each.is_alive() for each in started) else "is lost", flush=True)
        elif line == "terminate\\n":
            os.kill(pid, signal.SIGTERM)
        else:
            eval(line)
            print("done", flush=True)
    os._exit(0)
"""
HOLD = ("fork", "spawn", "forkserver", "os.fork", "a fork of a spawned one",
        "a program that imports ringcomm")  # fmt: skip


class Rank:
    """A rank that has started a child of this kind."""

    def __init__(self, folder, kind):
        path = folder / "family.py"
        path.write_text(RANK)
        self.process = subprocess.Popen(
            [sys.executable, path, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.child = int(self.process.stdout.readline())
        self.pidfd = open_pidfd(self.child)

    def do(self, text):
        """Have the rank do this, and return what it answers."""
        print(text, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def catch(self):
        assert self.do("catch_stop_signals()") == "done"

    def signal_all(self, number):
        """Send it to all processes of the job, as launchers and schedulers do."""
        os.killpg(self.process.pid, number)

    def child_lives(self):
        """Return whether the child answers: it has handled all earlier signals then."""
        return self.do("ask") == "lives"

    def child_ends(self):
        return bool(select.select([self.pidfd], [], [], DEADLINE_S)[0])

    def close(self):
        os.close(self.pidfd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:
            pass


@pytest.fixture
def start(tmp_path):
    with contextlib.ExitStack() as stack:

        def start(kind):
            rank = Rank(tmp_path, kind)
            stack.callback(rank.close)
            return rank

        yield start


@pytest.mark.parametrize("kind", HOLD)
def test_a_child_holds_what_its_rank_catches_and_is_ended_by_its_rank(kind, start):
    rank = start(kind)
    rank.catch()  # later than the child was started
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        rank.signal_all(number)
        assert rank.child_lives()
    print("terminate", file=rank.process.stdin, flush=True)
    assert rank.child_ends()


def test_a_child_takes_what_its_rank_does_not_catch(start):
    rank = start("fork")
    os.kill(rank.child, signal.SIGUSR1)
    assert rank.child_ends()


def test_a_child_takes_what_its_rank_catches_no_more(start):
    rank = start("fork")
    rank.catch()
    assert rank.do("release_stop_signals()") == "done"
    os.kill(rank.child, signal.SIGTERM)
    assert rank.child_ends()


@pytest.mark.parametrize("kind", ["fork", "a fork of a spawned one"])
def test_a_child_takes_a_signal_once_its_rank_is_dead(kind, start):
    rank = start(kind)
    rank.catch()
    rank.process.kill()
    rank.process.wait()
    os.kill(rank.child, signal.SIGTERM)
    assert rank.child_ends()


def test_what_a_child_handles_itself_it_does_not_hold(start):
    rank = start("a fork that handles signals")
    rank.catch()
    rank.signal_all(signal.SIGUSR1)
    assert rank.do("ask") == "handled"


def test_a_signal_that_a_child_holds_has_its_turn_when_the_rank_ends(start):
    rank = start("fork")
    rank.catch()
    assert rank.do("pass_stop_signals_on()") == "done"
    assert rank.child_lives()  # it holds none
    rank.signal_all(signal.SIGUSR1)
    assert rank.child_lives()
    assert rank.do("pass_stop_signals_on()") == "done"
    assert rank.child_ends()


def test_a_program_that_knows_nothing_of_ringcomm_takes_the_signal(start):
    rank = start("a program without ringcomm")
    rank.catch()
    rank.signal_all(signal.SIGUSR1)
    assert rank.child_ends()


def test_it_ignores_what_env_has_it_ignore_and_is_ended_by_its_rank(start):
    rank = start("a program behind env")
    rank.catch()
    rank.signal_all(signal.SIGUSR1)
    assert rank.child_lives()
    print("terminate", file=rank.process.stdin, flush=True)
    assert rank.child_ends()
