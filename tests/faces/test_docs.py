"""What docs/data.md shows must run: each python block is a job (on one rank only at length)."""

import re
from pathlib import Path

import pytest
from harness import at_length, run_script

pytest.importorskip("torch", reason="the core is tested without torch, too")

PAGE = Path(__file__).parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("size", at_length([1, 2], [2]))
@pytest.mark.parametrize("block", at_length(BLOCKS, BLOCKS[:1]))
def test_block_runs(block, size, tmp_path):
    job = run_script(size, block, cwd=tmp_path)
    assert job.code == 0, job.output
