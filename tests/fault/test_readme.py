"""What the README shows must run: each python block is a job of 2 ranks."""

import re
from pathlib import Path

import pytest
from harness import run_script

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS, ids=["registered", "arrays", "async", "torch"])
def test_block_runs(block, tmp_path):
    if "import torch" in block:
        pytest.importorskip("torch", reason="the core is tested without torch, too")
    job = run_script(2, block, cwd=tmp_path)
    assert job.code == 0, job.output


def test_what_goes_before_os_exit_ends_the_job_well(tmp_path):
    [end] = re.findall(r"End with `os._exit` only after `(.*?)`", README)
    world = "ringcomm.init(); ringcomm.barrier(); "
    program = f"import os, ringcomm; {world}ringcomm.shutdown(); {world}{end}; os._exit(0)"
    job = run_script(3, program, cwd=tmp_path)
    assert (job.code, job.output) == (0, "")
