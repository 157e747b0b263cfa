"""torch.distributed's backend in real jobs: distributed_suite.py, and ways to start."""

from pathlib import Path

import pytest
from harness import run_job

pytest.importorskip("torch", reason="the core is tested without torch, too")

ROOT = Path(__file__).parents[2]


def run_suite(name, size, tmp_path, *more):
    suite = ROOT / "tests" / "mpi" / name
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider", "-xq"]
    return run_job(size, "-P", "-m", "pytest", *options, *more, suite, cwd=tmp_path, timeout_s=240)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("suite", ["distributed_suite.py"])
def test_suite_passes_on_every_rank(suite, size, tmp_path):
    job = run_suite(suite, size, tmp_path)
    assert job.code == 0, job.output
    assert job.output.count(" passed") == size, job.output
    assert "x rank" not in job.output
