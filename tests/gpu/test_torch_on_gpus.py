"""torch on simulated GPUs: c10d, DDP, FSDP2, DistributedOptimizer.

The parts of a job are those of torch_on_gpus_job.py. To import torch takes each rank 2 s of a core.
"""

from functools import cache
from itertools import product
from pathlib import Path

import pytest
from harness import at_length, run_job

JOB = Path(__file__).with_name("torch_on_gpus_job.py")
N_RANKS = at_length(3, 2)
TRANSPORTS = ("ipc", "nccl", "staged")

# The group of c10d asks for no transport, and each moves data between processes in
# test_mpirun_jobs.py. To import FSDP2, whose collectives are among those of c10d, takes long, too.
GATE = ("c10d ipc", "training nccl 0", "training ipc 1")
ALL = (
    *(f"c10d {each} with-fsdp2" for each in TRANSPORTS),
    *(f"training {each} {shard_state}" for each, shard_state in product(TRANSPORTS, (0, 1))),
)


@cache
def run_all_of_the_gate(folder):
    return run_job(N_RANKS, JOB, folder, *GATE, cwd=folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("together")


@pytest.mark.parametrize("part", at_length(ALL, GATE))
def test_torch_on_gpus_is_as_in_host_memory(part, folder, tmp_path):
    job = at_length(None, GATE) and run_all_of_the_gate(folder)
    if job is None or not is_through(job, part):  # alone, for one that fails hides those behind it
        job = run_job(N_RANKS, JOB, tmp_path, part, cwd=tmp_path)
        assert job.code == 0, job.output
    if part == GATE[-1]:
        assert job.code == 0, job.output
    assert is_through(job, part), job.output


def is_through(job, part):
    return job.output.count(f"is through {part}\n") == N_RANKS
