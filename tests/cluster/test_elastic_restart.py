"""`ringcomm run --elastic` over hosts: a job that has lost a host begins anew on the others."""

import json
import os
import re
import shlex
import subprocess

import pytest
from fakecluster import running
from harness import BIN, HANG_S, at_length, job_environment, wait_until

TRAIN = """
import os, time
import numpy as np
import ringcomm as rc
rc.init()
state = rc.elastic.ArrayState(step=0, x=np.zeros(100))
state.keep_in("state", every=5)

began = None  # in this job: those that are left may go on for a moment, before mpirun ends them

@rc.elastic.run
def train(state):
    global began
    began = state.step if began is None else began
    while state.step < (1_000_000 if began == 0 else began + 20):
        state.x += rc.allreduce(np.ones(100), rc.AVERAGE)
        state.step += 1
        state.commit()
        if began == 0 and state.step == 20:
            open(f"started.{rc.rank()}", "w").close()
    assert (state.x == state.step).all()
    print(f"began at {began}, ended at {state.step} of {rc.size()} ranks", flush=True)

train(state)
"""


# A crash takes three times RINGCOMM_ELASTIC_HANG_S, and the gate has no time for both.
@pytest.mark.parametrize("deed", at_length(["kill", "crash"], ["kill"]))
def test_a_job_whose_host_is_lost_goes_on_from_the_kept_commit_on_the_others(
    deed, cluster, tmp_path
):
    (tmp_path / "train.py").write_text(TRAIN)
    env = job_environment({"TMPDIR": str(tmp_path), "RINGCOMM_ELASTIC_HANG_S": "5"})
    with running(f"restart-{os.getpid()}", 3, cluster.rate) as doomed:
        reach = [str(each) for each in doomed.launch_options(is_mpich=False)]
        reach = reach[reach.index("--prtemca") :]  # not the host file
        job = subprocess.Popen(
            [
                *doomed.entering("h0", tmp_path),
                *(BIN / "ringcomm", "run", "--run-folder", "run", "--grace", "4"),
                *("--elastic", "2:4", "-H", "h0:1,h1:1,h2:2"),
                *("--launcher-options", shlex.join(reach), "train.py"),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        files = [tmp_path / f"started.{rank}" for rank in range(4)]
        wait_until(lambda: all(path.exists() for path in files), "no start", 60)
        getattr(doomed, deed)("h2")
        try:
            output, _ = job.communicate(timeout=HANG_S)
        finally:
            job.kill()
    assert job.returncode == 0, output
    assert "h2 does not answer; it is started again on h0:1, h1:1" in output, output
    began, ended = re.search(r"began at (\d+), ended at (\d+) of 2 ranks", output).groups()
    assert int(began) >= 20
    assert int(began) % 5 == 0, output
    assert int(ended) == int(began) + 20
    assert f"the job goes on from commit {began}" in output
    assert json.loads((tmp_path / "run-restart-1" / "end.json").read_text())["code"] == 0
