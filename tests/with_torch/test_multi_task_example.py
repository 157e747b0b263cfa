"""examples/multi_task.py: the trunk is one, each task has a head, and both tasks are learnt."""

from pathlib import Path

import pytest
from harness import run_job

EXAMPLE = Path(__file__).parents[2] / "examples" / "multi_task.py"


@pytest.mark.at_length  # a job takes 30 s of a core, of which most is to import torch
@pytest.mark.parametrize("n", [4, 5])  # 5: one task has more ranks than the other
def test_ranks_of_two_tasks_share_a_trunk_and_have_heads_of_their_own(n, tmp_path):
    job = run_job(n, EXAMPLE, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    assert f"{n} ranks, loss on other samples: number 0.1" in job.output
