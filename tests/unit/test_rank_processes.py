"""`ringcomm run` knows its ranks whatever they become, and takes no other process for one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE_S, wait_until

from ringcomm.launch.job.processes.local_ranks import (
    ranks_here,
    send_signal,
    session_members,
)
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launched import rank_program

WAIT = "open('here', 'w').close(); sys.stdin.read()"
# What setproctitle does: the arguments and the environment are overwritten.
TITLED = f"""
import ctypes, os, sys
fields = open("/proc/self/stat").read().rpartition(")")[2].split()
start, end = int(fields[45]), int(fields[48])
ctypes.memset(start, 0, end - start)
title = b"TITLE"
ctypes.memmove(start, title, min(len(title), end - start - 1))
{WAIT}
"""
NAMED = f"""
import ctypes, sys
ctypes.CDLL(None).prctl(15, "a rank, \u8a13\u7df4\u4e2d".encode())  # PR_SET_NAME, which cuts it
{WAIT}
"""
PYTHON = (sys.executable, "-S", "-c")
PROGRAMS = {
    "a title": (*PYTHON, TITLED),
    "a long title with a value": (*PYTHON, TITLED.replace("TITLE", 150 * "a title, " + "lr=0.1")),
    "a name that is cut in the middle of a character": (*PYTHON, NAMED),
    "a shell that becomes another program": (
        "sh", "-c", 'exec "$@"', "sh", *PYTHON, f"import sys; {WAIT}",
    ),
    "the same, without its environment": ("env", "-i", *PYTHON, f"import sys; {WAIT}"),
}  # fmt: skip


def start(cwd, *program):
    """Start the one rank of a run; it ends with 0 when its stdin is closed."""
    folder = RunFolder(cwd)
    folder.create({}, {})
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", rank_program.__file__, cwd, *program],
        cwd=cwd,
        env={**os.environ, "RANK": "0"},
        stdin=subprocess.PIPE,
    )
    wait_until(lambda: (cwd / "here").exists() or process.poll() is not None, "no rank is there")
    return process, folder


def end(process):
    process.stdin.close()  # ends who got no signal
    return process.wait(DEADLINE_S)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_rank_is_known_whatever_it_becomes(name, tmp_path):
    process, folder = start(tmp_path, *PROGRAMS[name])
    with process:
        rank = ranks_here(folder)[0]
        assert (rank.pid, rank.lives) == (process.pid, True)
        assert rank.pid in session_members(os.getsid(rank.pid))
        send_signal(signal.SIGTERM, {0: rank}, folder)
        wait_until(lambda: not rank.lives, "it has ended, though nobody has waited for it yet")
        assert end(process) == -signal.SIGTERM
    assert not rank.lives


def test_a_process_that_has_got_the_pid_of_a_rank_is_none(tmp_path):
    process, folder = start(tmp_path, *PYTHON, f"import sys; {WAIT}")
    with process:
        path = tmp_path / "rank-0.at"
        pid, host, ticks = path.read_text().split()
        path.write_text(f"{pid} {host} {int(ticks) - 1}\n")
        rank = ranks_here(folder)[0]
        assert not rank.lives
        send_signal(signal.SIGTERM, {0: rank}, folder)
        assert end(process) == 0


# A rank's program notes itself in init(). It is the child of a script, or has lost its parent.
NOTES = """
import os, sys
from ringcomm.launched.rank_process import note_rank_process
print(os.getpid(), file=open("pid", "w"))
if sys.argv[1:]:
    os.environ["RINGCOMM_RUN_FOLDER"] = sys.argv[1]
note_rank_process()
open("here", "w").close(); sys.stdin.read()
"""


def test_the_process_that_a_script_starts_is_the_rank_from_init_on(tmp_path):
    process, folder = start(tmp_path, "sh", "-c", '"$@"; exit 5', "sh", sys.executable, "-c", NOTES)
    with process:
        rank = ranks_here(folder)[0]
        assert rank.lives
        assert rank.pid == int((tmp_path / "pid").read_text()) != process.pid
        send_signal(signal.SIGTERM, {0: rank}, folder)
        assert end(process) == 5  # of the script


def test_a_script_that_becomes_the_rank_after_another_program_was_it_is_known(tmp_path):
    script = '"$@" </dev/null; exec "$@"'
    process, folder = start(tmp_path, "sh", "-c", script, "sh", sys.executable, "-c", NOTES)
    with process:
        wait_until(lambda: ranks_here(folder)[0].pid == process.pid, "the script is not noted")
        assert ranks_here(folder)[0].lives
        assert end(process) == 0


def test_a_process_that_does_not_see_its_script_is_not_noted(tmp_path):
    as_in_a_container = f"{2**22 + 1} {tmp_path}"  # above all pids
    program = ("sh", "-c", '"$@"; exit 5', "sh", sys.executable, "-c", NOTES, as_in_a_container)
    process, folder = start(tmp_path, *program)
    with process:
        assert ranks_here(folder)[0].pid == process.pid
        assert end(process) == 5
    assert not [each for each in Path(tmp_path).iterdir() if each.suffix == ".new"]
