"""Jobs of workers and servers, as mpirun starts them."""

import re
import sys
from pathlib import Path

import pytest
from harness import IS_MPICH, PROMPTLY_S, above_mpi, at_length, run_job, run_script

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


# What ps.init() gets; without `servers` it is what the environment says, or 1.
PROGRAMS_IN_GATE = [
    (4, "{}", 2, {"RINGCOMM_PS_SERVERS": "2"}),
    (3, "dict(servers=2, colocated=True)", 3, {}),
]
PROGRAMS = [*PROGRAMS_IN_GATE, (2, "{}", 1, {})]
# After TRAIN, in its job.
CALLS = """
t = ps.table("ten", 10, init=range(10))
assert t.call("largest").wait() == [9.0]
print("called", flush=True)
"""


@pytest.mark.skipif(IS_MPICH, reason="tried with one mpirun's colon syntax, of Open MPI")
def test_servers_with_a_command_of_their_own_import_modules_with_functions(tmp_path):
    (tmp_path / "train.py").write_text("import my_functions\n" + TRAIN + CALLS)
    (tmp_path / "my_functions.py").write_text(
        "from ringcomm import ps\n\n@ps.function\ndef largest(values):\n    return values.max()\n"
    )
    servers = (":", "-np", 2, sys.executable, "-m", "ringcomm.ps.server", "my_functions")
    job = run_job(2, "train.py", "{}", *servers, cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count("of 2 has") == 2
    assert job.output.count("called") == 2


# After TRAIN, in its job.
PULLS = """
init = ps.initializers.normal(std=0.1)
tables = [
    ps.hashtable(f"t{k}", 1 + 3 * k, updater=ps.optim.SGD(1.0), init=init, mode=mode,
                 pull_compression="fp16" if k == 2 else None)
    for k, mode in enumerate(["async", "sync", "sync", ps.SSP(1)] * 3)
]
rng = np.random.default_rng(rc.rank())
pulls = [(kv, rng.integers(0, 500, (700 + rc.rank(), 3))) for kv in (*tables, tables[0])]
for _ in range(5):
    for kv in tables:
        kv.push(np.arange(400), np.ones((400, kv.dim), np.float32)).wait()
    rc.barrier()
    rows = ps.pull_many(pulls).wait()
    for (kv, keys), found in zip(pulls, rows, strict=True):
        assert np.array_equal(found, kv.pull(keys).wait()), kv
    rc.barrier()
    ps.complete_step()
print(f"worker {rc.rank()} of {rc.size()} has {len(rows)} arrays", flush=True)
"""


@above_mpi
@pytest.mark.parametrize(("n", "options", "workers", "env"), at_length(PROGRAMS, PROGRAMS_IN_GATE))
def test_one_program_trains_and_pulls_rows_of_many_tables_at_once(
    n, options, workers, env, tmp_path
):
    job = run_script(n, TRAIN + PULLS, options, cwd=tmp_path, env=env)
    assert job.code == 0, job.output
    assert len(re.findall(rf"of {workers} has -?[\d.]+, ", job.output)) == workers
    assert job.output.count(f"of {workers} has 13 arrays") == workers


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


DEATHS = {
    "a server that is killed": (
        "import threading\nimport mpi4py.MPI\nrc.init()\n"
        f"if rc.rank() == 2: threading.Timer(0.5, lambda: {KILL}).start()",
        "",
        "rank 2",
    ),
    "a worker that is killed": ("", f"if rc.rank() == 1: {KILL}", "rank 1"),
    "a worker that raises": ("", "if rc.rank() == 1: raise ValueError('boom')", "boom"),
}


# With MPICH, tests/fault has what else can happen to a rank.
# Workers that fail beside a server are in test_ringcomm_run.py, and what raises in tests/fault.
@pytest.mark.parametrize("which", at_length([*DEATHS], [*DEATHS][:1]))
def test_a_death_ends_the_job_and_is_named(which, tmp_path):
    before, after, told = DEATHS[which]
    job = run_script(3, DIES.format(before=before, after=after), cwd=tmp_path)
    assert job.code != 0
    assert told in job.output
    assert job.seconds < PROMPTLY_S


LEAVES = """
import time
import ringcomm as rc
from ringcomm import ps

@ps.evaluator(every=1)
def evaluate(step):
    ps.table("w", 10).pull().wait()

ps.init(evaluators=1)
ps.table("w", 10).pull().wait()
start = time.monotonic()
rc.shutdown()
print(f"left after {time.monotonic() - start:.1f} s", flush=True)
"""


@above_mpi
def test_nobody_waits_for_servers_that_have_nothing_more_to_do(tmp_path):
    job = run_script(3, LEAVES, cwd=tmp_path)
    assert job.code == 0, job.output
    told = [float(each) for each in re.findall(r"left after ([\d.]+) s", job.output)]
    assert len(told) == 1
    assert max(told) < 3


@above_mpi
def test_ranks_take_the_work_of_the_example_and_each_sample_is_seen_twice(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "work_queue.py"
    job = run_job(3, example, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "each sample was seen twice" in job.output
