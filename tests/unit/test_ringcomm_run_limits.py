"""Where `ulimit`, HOME or a scheduler's list do not allow a job, one sentence says so at once."""

import errno
import os
import resource
import subprocess
import sys
import threading

import pytest
from harness import DEADLINE_S, above_mpi, run_command, run_ranks, wait_until
from other_users import AS_ANOTHER, IS_ROOT, OTHER

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import ConfigError
from ringcomm.launch.job import command
from ringcomm.launch.job.limits import Limits

RUN = [sys.executable, "-P", "-m", "ringcomm", "run", "-np", "1", "true"]
SLURM = "export SLURM_JOB_ID=1 SLURM_JOB_NODELIST=h[a-b]"
LACKS = {
    "files": ("ulimit -n 24", "`ulimit -n` allows 24 open files, and mpirun needs 27 for 1 rank"),
    "hosts": (SLURM, "SLURM_JOB_NODELIST is 'h[a-b]', which is no list of hosts"),
    "home": ("unset HOME", "HOME is not set -> export HOME=$(mktemp -d)"),
}


@pytest.mark.parametrize("what", ["files", "hosts", pytest.param("home", marks=above_mpi)])
def test_it_is_one_sentence_and_no_traceback(what, tmp_path):
    deed, text = LACKS[what]
    ended = run_command(["sh", "-c", f'{deed}; exec "$@"', "sh", *RUN], cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("ringcomm run: ")
    assert text in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@above_mpi
def test_init_refuses_to_let_mpi_abort():
    code = "import ringcomm as rc\ntry: rc.init()\nexcept rc.ConfigError as error: print(error)"
    ended = run_command(["env", "-u", "HOME", sys.executable, "-P", "-c", code])
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("ringcomm.init: HOME is not set, and Open MPI aborts without it")


def test_who_has_few_threads_left_is_told_what_a_job_needs():
    Limits(files=31, threads=27, used=10).require(2)
    with pytest.raises(ConfigError, match="allows 30 open files, and mpirun needs 31 for 2 ranks"):
        Limits(files=30).require(2)
    text = "allows this user 26 processes and threads, of which 10 are there, and 2 ranks .* 17"
    with pytest.raises(ConfigError, match=text):
        Limits(threads=26, used=10).require(2)
    Limits().require(10_000)


def test_the_threads_of_this_user_count_and_root_has_no_limit(monkeypatch):
    uid = OTHER if IS_ROOT else os.getuid()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (14, 14))
    monkeypatch.setattr(os, "getuid", lambda: uid)
    argv = [*(AS_ANOTHER if IS_ROOT else []), "sleep", "600"]
    with subprocess.Popen(argv) as process:
        wait_until(lambda: command.limits_here().used, "it is not counted")
        process.kill()
        process.wait(DEADLINE_S)
    found = command.limits_here()
    assert (found.files, found.threads) == (14, 14)
    assert found.used == 0 or not IS_ROOT
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert command.limits_here() == Limits(14)


class Full:
    def start_thread(self):
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def no_thread(_):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("of", ["C++", "Python"])
def test_a_rank_without_threads_says_so_and_leaves_none_that_aborts_at_exit(of, monkeypatch):
    def body(_):
        progress = engine().progress
        if of == "C++":
            monkeypatch.setattr(progress, "_loop", Full())
        else:
            monkeypatch.setattr(threading.Thread, "start", no_thread)
        with pytest.raises(
            BlockingIOError, match=r"the threads of this rank: .*`ulimit -u` allows"
        ):
            progress.work_in_background()
        monkeypatch.undo()
        return [each.name for each in threading.enumerate()]

    assert "ringcomm" not in run_ranks(1, body)[0]
