"""Where the launcher ends a job that loses a rank: an elastic job says so, and ends as any other.

Of Open MPI's mpirun without an option, and of MPICH's; test_launcher_fault_tolerance.py has the
other launchers.
"""

import re

import pytest
from harness import IS_MPICH, above_mpi, run_script

FAILS = """
import os, signal, sys
import numpy as np
import ringcomm as rc
rc.init()
state = rc.elastic.ArrayState(step=0, x=np.zeros(1000))

@rc.elastic.run
def train(state):
    while state.step < 20:
        if rc.rank() == rc.size() - 1 and state.step == 5:
            HOW
        state.x += rc.allreduce(np.ones(1000))
        state.step += 1
        state.commit()

train(state)
print("went on", flush=True)
"""
LEAVES = """try:
                rc.elastic.leave()
            except rc.RingcommError as error:
                print(error, flush=True)
            {}"""
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
# The launcher may end the guardian that would have read the signal, before it reports.
KILLED = r"was killed by SIGKILL|ended without a word \(SIGKILL"
WAYS = {"kill": (KILL, KILLED), "raise": ("1 / 0", "raised ZeroDivisionError")}
WHY = r"MPICH \S+ ends a job when" if IS_MPICH else "mpirun ends the other ranks when one is lost"


@above_mpi
@pytest.mark.parametrize("how", WAYS)
def test_a_rank_can_neither_leave_nor_die_alone_and_one_line_has_said_so(how, tmp_path):
    statement, report = WAYS[how]
    body = FAILS.replace("HOW", LEAVES.format(statement))
    job = run_script(3, body, cwd=tmp_path, env={"RINGCOMM_ELASTIC": "1"})
    assert job.code != 0, job.output
    assert "went on" not in job.output, job.output
    lines = [line for line in job.output.splitlines() if line.startswith("elastic job:")]
    assert len(lines) == 1, job.output
    command = rf"`ringcomm run -np 3 --elastic 1:3 {tmp_path}/script.py`"
    assert re.search(rf"elastic job: {WHY}.*so a failure of a rank ends .*{command}", lines[0])
    assert "(docs/elastic.md)" in lines[0]
    culprits = re.findall(r"^x rank (\d).*", job.output, re.MULTILINE)
    assert culprits == ["2"], job.output
    assert re.search(report, job.output), job.output
    assert re.search(rf"^elastic.leave: {WHY}", job.output, re.MULTILINE), job.output


def test_a_reserve_that_was_not_needed_ends_no_earlier_than_the_ranks(tmp_path):
    saves = """time.sleep(0.5)  # a save; the reserve must not end in it
rc.barrier()
print("went on", flush=True)"""
    body = FAILS.replace("HOW", "pass").replace('print("went on", flush=True)', saves)
    elastic = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_RESERVES": "1"}
    job = run_script(3, body.replace("import os,", "import os, time,"), cwd=tmp_path, env=elastic)
    assert job.code == 0, job.output
    assert job.output.count("went on") == 2, job.output
    assert "x rank" not in job.output
