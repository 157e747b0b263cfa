"""Who has made what is left, this run of tests or another job of the machine; how it is ended."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import leftovers_plugin
import pytest
import shm_leftovers
from harness import wait_until

# Maps a file of /dev/shm, says so, and dies of a signal without having removed it.
MAKER = """
import mmap, os, sys
with open(sys.argv[1], "w+b") as file:
    file.truncate(4096)
    mapping = mmap.mmap(file.fileno(), 4096)
print("mapped", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("is_own", [True, False])
def test_a_file_is_left_by_the_run_whose_process_had_mapped_it(is_own, watch):
    path = Path(f"/dev/shm/sm_segment.of.a.test.{os.getpid()}")
    environment = {k: v for k, v in os.environ.items() if is_own or k != shm_leftovers.MARK}
    maker = subprocess.Popen(
        [sys.executable, "-S", "-c", MAKER, path],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert maker.stdout.readline() == b"mapped\n"
        assert (path.name in watch.files()) == is_own
        assert path.name not in watch.orphans()
        maker.communicate(b"\n")
        wait_until(lambda: (path.name in watch.orphans()) == is_own, "it is not told")
    finally:
        maker.kill()
        maker.communicate()
        path.unlink()
    assert path.name not in watch.files()


def test_what_a_failed_test_has_started_is_ended_and_waited_for():
    sleep = ["sleep", "60"]
    with subprocess.Popen(sleep) as earlier:
        before = set(shm_leftovers.pids())
        job = subprocess.Popen(sleep, stdout=subprocess.PIPE)
        leftovers_plugin.end_what_runs(before)
        assert job.returncode == -signal.SIGKILL
        assert earlier.poll() is None
        earlier.kill()


def test_a_child_is_of_this_run_from_the_moment_of_its_exec(monkeypatch):
    late = []

    def read(pid, name):
        found = shm_leftovers.read(pid, name)
        if pid == str(child.pid) and name == "environ" and len(late) < 3:
            late.append(found)
            return ""  # as /proc has it until exec is through
        return found

    monkeypatch.setattr(leftovers_plugin, "read", read)
    command = [shutil.which("sleep"), "100"]
    with subprocess.Popen(command) as child:
        found = dict(leftovers_plugin.processes_of_this_run())
        child.kill()
    assert found[str(child.pid)] == " ".join(command)
    assert len(late) == 3
