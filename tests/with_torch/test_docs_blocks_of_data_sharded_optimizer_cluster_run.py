"""What these pages show must run: each python block is a job (on one rank only at length)."""

import re
from pathlib import Path

import pytest
from harness import at_length, run_script

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


DATA, SHARDED = blocks_of("data.md"), blocks_of("sharded_optimizer.md")
CLUSTER = blocks_of("cluster.md")


def test_there_are_blocks():
    assert (len(DATA), len(SHARDED), len(CLUSTER)) == (5, 1, 1)


@pytest.mark.parametrize("size", at_length([1, 2], [2]))
@pytest.mark.parametrize("block", at_length(DATA, DATA[:1]) + at_length(SHARDED, []) + CLUSTER)
def test_block_runs(block, size, tmp_path):
    job = run_script(size, block, cwd=tmp_path)
    assert job.code == 0, job.output
