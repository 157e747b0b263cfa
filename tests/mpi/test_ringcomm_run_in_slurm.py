"""`ringcomm run` in a real Slurm of one node: sbatch, salloc, srun, scancel."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import slurm
from harness import BIN, IS_MPICH, job_environment, run_command, wait_until

TRAIN = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc
rc.init()
total = int(rc.allreduce(np.ones(1))[0])
print(total, os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"],
      os.environ["OMP_NUM_THREADS"], flush=True)
if "fail" in sys.argv and rc.rank() == 1:
    sys.exit(7)
if "wait" in sys.argv:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    rc.barrier()
    open("waiting", "w").close()
    while True:
        time.sleep(0.05)  # until the signal comes
rc.barrier()
"""


@pytest.fixture(scope="module")
def environ(tmp_path_factory):
    if reason := slurm.obstacle():
        pytest.skip(reason)
    with slurm.running(tmp_path_factory.mktemp("slurm")) as found:
        yield job_environment({"SLURM_CONF": found["SLURM_CONF"]})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))


COMMAND = [str(BIN / "ringcomm"), "run", "--run-folder", "run"]


def call(environ, *command):
    environ = environ | {"TMPDIR": os.environ["TMPDIR"]}
    environ.pop("OMP_NUM_THREADS")
    return run_command([str(each) for each in command], env=environ, stdin=subprocess.DEVNULL)


def end():
    return json.loads(Path("run/end.json").read_text())


def logs():
    return [path.read_text() for path in sorted(Path("run").glob("rank-*.log"))]


def batch(*command):
    text = "\n".join(["#!/bin/bash", "exec " + " ".join(map(str, command)), ""])
    Path("batch.sh").write_text(text)
    return ["-o", "out", "batch.sh"]


def test_sbatch_gives_the_number_of_ranks_and_of_threads(environ):
    call(environ, "sbatch", "-n2", "-c2", *batch(*COMMAND, "train.py"))
    wait_until(Path("run/end.json").exists, lambda: Path("out").read_text())
    assert end()["code"] == 0, Path("out").read_text()
    assert logs() == ["2 0 2 0 2\n", "2 1 2 1 2\n"]


PLACES = """
import os, subprocess, sys
import ringcomm as rc
names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")
before = [os.environ[name] for name in names]
if "plain" in sys.argv:
    os.environ.update(dict.fromkeys(names, "0"))
rc.init()
assert [os.environ[name] for name in names] == before == [str(rc.rank()), "2", str(rc.rank()), "0"]
if rc.rank() == 0 and "steps" in sys.argv:
    inner = ["srun", "--overlap", "-n1", "--mpi=none", "printenv", "SLURM_PROCID"]
    assert subprocess.check_output(inner, text=True).split() == ["0"]
rc.barrier()
print("as srun would", flush=True)
"""


def test_in_a_batch_step_each_rank_has_slurms_variables_of_its_own(environ):
    """Lightning and Accelerate go by them: each rank would train as rank 0."""
    Path("places.py").write_text(PLACES)
    for arguments in (["steps"], ["plain"]):
        job = call(environ, "salloc", "-n2", *COMMAND, "places.py", *arguments)
        assert job.returncode == 0, job
        assert logs() == ["as srun would\n"] * 2
        Path("run").rename("run-of-" + arguments[0])


def test_salloc_passes_the_culprits_exit_code(environ):
    job = call(environ, "salloc", "-n3", *COMMAND, "train.py", "fail")
    assert (job.returncode, end()["rank"]) == (7, 1), job
    assert "x rank 1" in job.stderr


def test_more_ranks_than_tasks_are_refused(environ):
    job = call(environ, "salloc", "-n2", *COMMAND, "-np", "3", "train.py")
    assert job.returncode == 2
    assert "the hosts of this Slurm job have 2 places" in job.stderr


def test_each_task_of_srun_is_refused_before_it_starts_a_job(environ):
    job = call(environ, "srun", "-n2", *COMMAND, "-np", "2", "train.py")
    assert job.returncode == 2
    assert "a rank of a job already" in job.stderr
    assert not Path("run").exists()


def with_srun(environ):
    types = call(environ, "srun", "--mpi=list")
    needed = "pmi2" if IS_MPICH else "pmix"
    works = call(environ, "srun", f"--mpi={needed}", "-n1", "true").returncode == 0
    if needed not in (types.stdout + types.stderr).split() or not works:
        pytest.skip(f"this Slurm has no working {needed}: apt install libpmix-dev")


def test_srun_starts_the_ranks_if_asked_to(environ):
    with_srun(environ)
    job = call(environ, "salloc", "-n2", *COMMAND, "--launcher", "srun", "train.py")
    assert job.returncode == 0, job
    assert "srun" in json.loads(Path("run/run.json").read_text())["launcher"][0]
    assert [log[:8] for log in logs()] == ["2 0 2 0 ", "2 1 2 1 "]


@pytest.mark.at_length  # salloc shows it in the gate
def test_the_culprits_exit_code_comes_through_srun(environ):
    with_srun(environ)
    job = call(environ, "salloc", "-n3", *COMMAND, "--launcher", "srun", "train.py", "fail")
    assert (job.returncode, end()["rank"]) == (7, 1), job


def test_scancel_lets_the_ranks_stop_in_order(environ):
    command = batch(*COMMAND, "train.py", "wait")
    name = call(environ, "sbatch", "--parsable", "-n2", *command).stdout.strip()
    wait_until(Path("waiting").exists, "no rank waits")
    call(environ, "scancel", "--full", "--signal=TERM", name)
    wait_until(Path("run/end.json").exists, lambda: Path("out").read_text())
    assert end()["code"] == 75, (end(), Path("out").read_text())
