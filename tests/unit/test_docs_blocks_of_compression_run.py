"""What docs/compression.md shows must run."""

import re
from pathlib import Path

import pytest
from ps_ranks_as_threads import run_workers

PAGE = Path(__file__).parents[2] / "docs" / "compression.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS[:3], ids=["codec", "int8", "residual"])
def test_block_runs(block):
    exec(compile(block, str(PAGE), "exec"), {})


@pytest.mark.long
def test_the_block_with_servers_runs():
    code = compile(BLOCKS[3].replace("ps.init(servers=1)", ""), str(PAGE), "exec")
    assert run_workers(2, lambda _: exec(code, {})) == [None, None]
