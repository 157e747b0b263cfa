"""What the pages for users show must run: each python block is a job of 2 ranks."""

import re
from pathlib import Path

import pytest
from harness import run_script

DOCS = Path(__file__).parents[2] / "docs"
BLOCKS = [
    block
    for page in ("collectives.md", "torch.md", "elastic.md")
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]


def test_there_are_blocks():
    assert len(BLOCKS) == 8


@pytest.mark.parametrize(
    "block",
    BLOCKS,
    ids=["arrays", "async", "registered", "torch", "elastic", "samples", "weighed", "ddp"],
)
def test_block_runs(block, tmp_path):
    if "import torch" in block:
        pytest.importorskip("torch", reason="the core is tested without torch, too")
    job = run_script(2, block, cwd=tmp_path)
    assert job.code == 0, job.output


def test_what_goes_before_os_exit_ends_the_job_well(tmp_path):
    page = (DOCS / "running.md").read_text()
    [end] = re.findall(r"\*\*`os._exit`:\*\* call it only after `(.*?)`", page)
    world = "ringcomm.init(); ringcomm.barrier(); "
    program = f"import os, ringcomm; {world}ringcomm.shutdown(); {world}{end}; os._exit(0)"
    job = run_script(3, program, cwd=tmp_path)
    assert (job.code, job.output) == (0, "")
