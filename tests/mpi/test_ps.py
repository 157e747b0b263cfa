"""Jobs of workers and servers, as mpirun starts them."""

import re
import sys
from pathlib import Path

import pytest
from harness import IS_MPICH, run_job, run_script

TRAIN = """
import sys
import numpy as np
import ringcomm as rc
from ringcomm import ps

ps.init(**eval(sys.argv[1]))
n = 300_001
t = ps.table("w", n, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=400_000)
for _ in range(5):
    t.push(np.full(n, -1.0 - rc.rank(), np.float32))
    values = t.pull().wait()
expected = 5 * (1 + rc.size()) / 2
assert (values == expected).all(), (values, expected)
kv = rc.allreduce(np.ones(1)).item()
print(f"worker {rc.rank()} of {rc.size()} has {values[0]}, {kv}", flush=True)
"""


@pytest.mark.parametrize(
    ("n", "options", "workers"),
    [(2, "{}", 1), (4, "dict(servers=2)", 2), (3, "dict(servers=2, colocated=True)", 3)],
)
def test_one_program(n, options, workers, tmp_path):
    job = run_script(n, TRAIN, options, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count(f"of {workers} has") == workers


def test_the_environment_says_how_many_servers(tmp_path):
    job = run_script(4, TRAIN, "{}", cwd=tmp_path, env={"RINGCOMM_PS_SERVERS": "3"})
    assert job.code == 0, job.output
    assert job.output.count("worker 0 of 1 has") == 1


@pytest.mark.skipif(IS_MPICH, reason="tried with one mpirun's colon syntax, of Open MPI")
def test_commands_of_their_own(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    servers = (":", "-np", 2, sys.executable, "-m", "ringcomm.ps.server")
    job = run_job(2, "train.py", "{}", *servers, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("of 2 has") == 2


DIES = """
import os, signal
import numpy as np
import ringcomm as rc
from ringcomm import ps

{before}
ps.init(servers=1)
t = ps.table("w", 1000, mode="sync")
{after}
while True:
    t.push(np.ones(1000, np.float32))
    t.pull().wait()
"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (
            "import threading\nimport mpi4py.MPI\nrc.init()\n"
            f"if rc.rank() == 2: threading.Timer(0.5, lambda: {KILL}).start()",
            "",
            "rank 2",
        ),
        ("", f"if rc.rank() == 1: {KILL}", "rank 1"),
        ("", "if rc.rank() == 1: raise ValueError('boom')", "boom"),
    ],
    ids=["a server that is killed", "a worker that is killed", "a worker that raises"],
)
def test_a_death_ends_the_job_and_is_named(before, after, told, tmp_path):
    job = run_script(3, DIES.format(before=before, after=after), cwd=tmp_path)
    assert job.code != 0
    assert told in job.output
    assert job.seconds < 20


def test_the_block_of_the_page_runs(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "parameter_server.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    job = run_script(3, block, cwd=tmp_path)
    assert job.code == 0, job.output
