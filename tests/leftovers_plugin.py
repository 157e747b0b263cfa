"""A plugin for pytest: a test file that leaves something behind fails, by its own name.

Else a test of a later file fails, and passes when it is run alone.
"""

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from shm_leftovers import MARK, Watch, pids, read

NAME = "leftovers of files"  # of the plugin
LIMIT_S = float(os.environ.get("LEFTOVERS_LIMIT_S", "60"))  # for what is ending under load
EXEC_LIMIT_S = 2.0  # for exec to give a process its environment
LISTENING = "0A"  # the state of a socket in /proc/net/tcp
BY_PYTHON = ("multiprocessing.resource_tracker",)  # lives as long as the process that needed it
NOT_OF_A_TEST = {"PYTEST_CURRENT_TEST", MARK, "TORCHINDUCTOR_CACHE_DIR"}  # torch sets it for good


def pytest_configure(config):
    if not is_in_a_job():  # MPI keeps processes, files and sockets of its own
        config.pluginmanager.register(Leftovers(), NAME)


def is_in_a_job():
    return "PMIX_RANK" in os.environ or "PMI_RANK" in os.environ


@dataclass(frozen=True)
class Surroundings:
    """What a test may change that outlives it; each is a dict, so that a difference has a name."""

    processes: dict
    shared_memory: dict
    listening_ports: dict
    environment: dict
    working_directory: dict
    signal_handlers: dict
    threads: dict


def differences(before, after):
    """Return a line for each thing that was added, changed or taken away, as far as it matters."""
    found = []
    for field in fields(Surroundings):
        old, new = getattr(before, field.name), getattr(after, field.name)
        name = field.name.replace("_", " ")
        for key in sorted({*old, *new}, key=str):
            if key not in old:
                found.append(f"{name}: {key} is new: {new[key]}")
            elif key not in new and field.name in ("environment", "signal_handlers"):
                found.append(f"{name}: {key} is gone, it was {old[key]}")
            elif key in new and old[key] != new[key]:
                found.append(f"{name}: {key} was {old[key]}, and is {new[key]}")
    return found


def with_added(known, before, after):
    """Return `known` with all that `after` has and `before` had not."""
    added = {
        field.name: {
            **getattr(known, field.name),
            **dict(getattr(after, field.name).items() - getattr(before, field.name).items()),
        }
        for field in fields(Surroundings)
    }
    return Surroundings(**added)


def surroundings(watch):
    return Surroundings(
        processes=dict(processes_of_this_run()),
        shared_memory=dict.fromkeys(watch.files(), "in /dev/shm"),
        listening_ports=listening_ports(),
        environment={k: v for k, v in os.environ.items() if k not in NOT_OF_A_TEST},
        working_directory={"cwd": os.getcwd()},
        signal_handlers=signal_handlers(),
        threads={each.ident: each.name for each in threading.enumerate()},
    )


def end_what_runs(spared):
    """End the processes of this run but these, after a test that failed before it could do so.

    Guardians end by themselves, and remove the files of their ranks.
    """
    running = {int(pid) for pid, _ in processes_of_this_run() if pid not in spared}
    for pid in running:
        if not is_guardian(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    # Else a later test hears that nobody has waited for them. A proxy has no type of its own.
    for each in (x for x in gc.get_objects() if issubclass(type(x), subprocess.Popen)):
        if each.pid in running and each.returncode is None:
            each.communicate(timeout=LIMIT_S)


def is_guardian(pid):
    return read(pid, "cmdline").split("\0")[0].endswith("/ringcomm-guardian")


def processes_of_this_run():
    mark = f"{MARK}={os.getpid()}"
    for pid in pids():
        if mark in environment_of(pid).split("\0"):
            command = read(pid, "cmdline").replace("\0", " ").strip()
            if not any(each in command for each in BY_PYTHON):
                yield pid, command


def environment_of(pid):
    """Return it as /proc does, but not the empty one that a child has for a moment in exec."""
    deadline = time.monotonic() + EXEC_LIMIT_S
    while True:
        found = read(pid, "environ")
        if found or not is_running_child(pid) or time.monotonic() > deadline:
            return found
        time.sleep(0.001)


def is_running_child(pid):
    state, parent, *_ = read(pid, "stat").rpartition(")")[2].split() or ("X", "0")
    return int(parent) == os.getpid() and state not in "ZX"


def listening_ports():
    """Return {port: family} of the sockets of this process that listen."""
    own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()}
    ports = {}
    for family in ("tcp", "tcp6"):
        for line in read("self", f"net/{family}").splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTENING and f"socket:[{rest[5]}]" in own:
                ports[int(local.rpartition(":")[2], 16)] = family
    return ports


def signal_handlers():
    """Return the handlers by signal, without those of torch's DataLoader, which stay for good."""
    handlers = {each.name: signal.getsignal(each) for each in signal.Signals}
    return {
        name: "the default, or that of a loader of torch" if is_default(handler) else handler
        for name, handler in handlers.items()
    }


def is_default(handler):
    return handler in (None, signal.SIG_DFL) or handler.__module__.startswith("torch.")


class Leftovers:
    """Compares what is there before the first test of a file with what is there after its last."""

    def __init__(self):
        self.before = None
        self.watch = Watch()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item, nextitem):
        if self.before is None:
            self.before = surroundings(self.watch)
        result = yield
        if nextitem is None or nextitem.path != item.path:
            if found := self.left():
                report_as_failed(item, found)
            self.before = None
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        """Do not blame the first file that asks for a fixture of the whole session."""
        if fixturedef.scope not in ("session", "package"):
            return (yield)
        before = surroundings(self.watch)
        result = yield
        self.before = with_added(self.before, before, surroundings(self.watch))
        return result

    def left(self):
        deadline = time.monotonic() + LIMIT_S
        while found := differences(self.before, surroundings(self.watch)):
            if time.monotonic() > deadline or not any(is_ending(line) for line in found):
                break
            time.sleep(0.02)  # nobody tells of the end of another process
        return found

    def pytest_unconfigure(self):
        self.watch.end()


def is_ending(line):
    return line.startswith(("processes", "shared memory", "threads", "listening ports"))


def report_as_failed(item, found):
    file = item.nodeid.partition("::")[0]
    text = "\n".join([f"{file} left behind:", *(f"E   {line}" for line in found)])
    report = pytest.TestReport(
        nodeid=file,
        location=(file, None, "left behind"),
        keywords={},
        outcome="failed",
        longrepr=text,
        when="teardown",
    )
    item.ihook.pytest_runtest_logreport(report=report)
