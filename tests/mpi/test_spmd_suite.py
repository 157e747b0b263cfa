"""Runs spmd_suite.py as a real job: every rank runs the same tests over MPI."""

from pathlib import Path

import pytest
from harness import IS_MPICH, at_length, run_job, suite_command

SIZES = at_length([1, 2, 3, 4, 8], [2] if IS_MPICH else [3])


@pytest.mark.parametrize("size", SIZES)
def test_suite_passes_on_every_rank(size, tmp_path):
    suite = Path(__file__).with_name("spmd_suite.py")
    job = run_job(size, *suite_command(suite), cwd=tmp_path, timeout_s=180)
    assert job.code == 0, job.output
    assert job.output.count(" passed") == size, job.output
    assert "x rank" not in job.output
