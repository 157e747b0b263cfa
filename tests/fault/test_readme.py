"""What the README shows must run: each python block is a job of 2 ranks."""

import re
from pathlib import Path

import pytest
from harness import run_script

BLOCKS = re.findall(
    r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text(), re.DOTALL
)


def test_there_are_blocks():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS, ids=["registered", "arrays", "async", "torch"])
def test_block_runs(block, tmp_path):
    if "import torch" in block:
        pytest.importorskip("torch", reason="the core is tested without torch, too")
    job = run_script(2, block, cwd=tmp_path)
    assert job.code == 0, job.output
