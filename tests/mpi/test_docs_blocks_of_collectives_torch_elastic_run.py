"""What the pages for users show must run: each python block, on 2 ranks."""

import re
from pathlib import Path

import first_job_page
import pytest
from harness import run_script

DOCS = Path(__file__).parents[2] / "docs"
FIRST_JOB = ["import sys", 'sys.argv = ["train.py", "2"]', first_job_page.whole_program()]
BLOCKS = [
    block
    for page in ("collectives.md", "from_mpi4py.md", "torch.md", "elastic.md")
    for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]
BLOCKS.append("\n".join(FIRST_JOB))


def test_there_are_blocks():
    assert len(BLOCKS) == 14


# With one start of python and torch for all.
ONE_AFTER_ANOTHER = """
for number, block in enumerate({blocks}):
    print("block", number, flush=True)
    exec(compile(block, f"block {{number}}", "exec"), {{"__name__": "__main__"}})
"""


def test_the_blocks_run_one_after_another(tmp_path):
    pytest.importorskip("torch", reason="the core is tested without torch, too")
    job = run_script(2, ONE_AFTER_ANOTHER.format(blocks=BLOCKS), cwd=tmp_path)
    assert job.code == 0, job.output
    assert job.output.count(f"block {len(BLOCKS) - 1}") == 2, job.output


@pytest.mark.at_length  # for a start of torch takes 3 s of a core, and the test above runs them all
@pytest.mark.parametrize(
    "block",
    BLOCKS,
    ids=[
        "arrays",
        "async",
        "messages",
        "grids",
        "registered",
        "mpi4py",
        "torch",
        "elastic",
        "kept",
        "samples",
        "weighed",
        "sharded",
        "ddp",
        "first job",
    ],
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
    job = run_script(2, program, cwd=tmp_path)
    assert (job.code, job.output) == (0, "")


@pytest.mark.at_length  # as each of these costs a start of torch on each rank
@pytest.mark.parametrize("number", range(5))
def test_each_program_of_the_first_job_runs(number, tmp_path):
    pytest.importorskip("torch", reason="the core is tested without torch, too")
    size = 1 if number == 0 else 2
    job = run_script(size, first_job_page.programs()[number], "3", cwd=tmp_path)
    assert job.code == 0, job.output
