"""Simulated GPUs of real processes, under mpirun; NCCL is a stand-in, shared memory is not."""

from pathlib import Path

import pytest
from harness import IS_MPICH, PROMPTLY_S, above_mpi, at_length, run_script

TESTS = Path(__file__).parents[1]

ALL_TRANSPORTS = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import numpy as np
import ringcomm as rc
import simulated_gpu as sim
from gpu_ranks import TRANSPORTS, begin, choose
from random_programs import make_program, run_program
from simulated_gpu import Simulated

seed = int(sys.argv[1])
for turn, transport in enumerate(TRANSPORTS):  # each is founded anew, in the same processes
    rc.init()
    gpu = begin(rc.rank(), sys.argv[2], seed=seed, **choose(transport))
    rc.barrier()
    run_program(make_program(seed + turn, rc.size()), rc.rank(), seed, Simulated())
    x = rc.zeros(70_000, "float32", device="cuda")
    x.fill(rc.rank() + 1)
    rc.allreduce_(x)
    half = rc.allreduce(sim.array(np.full(9, rc.rank(), np.float16)), rc.AVERAGE)
    assert (x.get() == sum(range(1, rc.size() + 1))).all()
    assert (half.get() == np.float16((rc.size() - 1) / 2)).all()
    chosen = str(rc.explain(1, device="cuda"))
    assert chosen.startswith(f"arrays on GPUs: {{transport}},"), chosen
    rc.shutdown()
    gpu.close()
    print(f"a rank is through {{transport}}", flush=True)
"""


@pytest.mark.parametrize("seed", at_length(range(5), range(1)))
def test_every_transport_between_processes(seed, tmp_path):
    n = at_length(4, 3)
    job = run_script(n, ALL_TRANSPORTS, seed, tmp_path, cwd=tmp_path)
    assert job.code == 0, job.output
    for transport in ("ipc", "nccl", "staged"):
        assert job.output.count(f"is through {transport}") == n, job.output


FAULT = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import os, signal, time
import numpy as np
import ringcomm as rc
import simulated_gpu as sim
from gpu_ranks import begin, choose
from harness import wait_until

transport, how, folder = sys.argv[1:]
rc.init()
gpu = begin(rc.rank(), folder, **choose(transport))
rc.barrier()
x = sim.array(np.ones(1000))
rc.allreduce_(x)
gpu.finish(0)
rc.barrier()
if rc.rank() == 2:
    gpu.freeze()
handle = rc.allreduce_async_(x, name="gradient")
handle.wait()  # all hosts are in it; the streams of the others wait for rank 2's
if rc.rank() == 2:
    rc.barrier()
    os.kill(os.getpid(), getattr(signal, how))
rc.barrier()
start = time.monotonic()
gpu.finish(0)  # as torch.cuda.synchronize(): comes back although the peer never will
print(f"rank {{rc.rank()}} was freed after {{time.monotonic() - start:.1f}} s", flush=True)
try:
    rc.allreduce_(x)
except (rc.PeerFailedError, rc.CommTimeoutError) as error:
    print(f"rank {{rc.rank()}} heard {{type(error).__name__}}: {{error}}", flush=True)
    open(f"{{folder}}/heard-{{rc.rank()}}", "w").close()
    others = [f"{{folder}}/heard-{{rank}}" for rank in (0, 1)]
    wait_until(lambda: all(map(os.path.exists, others)), "not all have heard")
    raise  # whoever ends first ends the others
"""


@pytest.mark.parametrize(
    ("transport", "how"),
    at_length(
        [(t, how) for t in ("ipc", "nccl") for how in ("SIGKILL", "SIGSTOP")],
        [("nccl", "SIGKILL")],
    ),
)
def test_a_rank_that_dies_or_stops_frees_the_streams_of_the_others(transport, how, tmp_path):
    # Only under ULFM does a launcher leave the others the time to say what they heard of a death.
    options = () if IS_MPICH or how == "SIGSTOP" else ("--with-ft", "ulfm")
    env = {"RINGCOMM_TIMEOUT_S": "3", "RINGCOMM_GRACE_S": "1"}
    job = run_script(3, FAULT, transport, how, tmp_path, cwd=tmp_path, options=options, env=env)
    assert job.code != 0
    assert job.seconds < PROMPTLY_S, job.output
    if IS_MPICH:  # whose launcher ends all at the first death
        return
    kind = "PeerFailedError" if how == "SIGKILL" else "CommTimeoutError"
    for rank in (0, 1):
        assert f"rank {rank} was freed" in job.output, job.output
        assert f"rank {rank} heard {kind}" in job.output, job.output
    assert "rank 2" in job.output


GOES_ON = f"""
import sys
sys.path[:0] = [{str(TESTS)!r}, {str(TESTS.parent / "ci")!r}]
import os, signal, threading
import simulated_gpu as sim
import simulated_torch
from gpu_ranks import begin, choose
import ringcomm as rc
import ringcomm.torch as hvd
from gpu_suite import elastic
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor.engine_gpus import Gpus

mode, folder = sys.argv[1:]
hvd.init()
gpu = begin(rc.rank(), folder, **choose("ipc"))
simulated_torch.count_as_gpu(gpu)
elastic.COUNT = 70_001  # a million takes the simulated streams seconds
make_step = elastic.make_step


@rc.elastic.on_new_view
def use_gpu():
    Gpus.use(engine(), sim.drivers())


def frozen_step(weights, optimizer, step):
    if (rc.elastic.view().members[rc.rank()], step) == (elastic.VICTIM, elastic.DIES_AT):
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        gpu.freeze()
    make_step(weights, optimizer, step)


elastic.make_step = frozen_step
elastic.train_and_check(mode, "cpu", fails_at=elastic.DIES_AT)
"""


@above_mpi
@pytest.mark.parametrize("mode", at_length(["run", "continue"], ["run"]))
def test_a_step_that_fails_on_the_streams_is_made_again_or_left_out(mode, tmp_path):
    """A rank dies while the streams of the others wait for it: they go on with wrong sums."""
    options = ("--with-ft", "ulfm", "--runtime-options", "error-nonzero-status=0")
    env = {"RINGCOMM_ELASTIC": "1"}
    job = run_script(3, GOES_ON, mode, tmp_path, cwd=tmp_path, options=options, env=env)
    assert "figure: 30 steps; from step 12 on with 2 ranks" in job.output, job.output
