"""What docs/compression.md shows must run."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "compression.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == 3


@pytest.mark.parametrize("block", BLOCKS, ids=["codec", "int8", "residual"])
def test_block_runs(block):
    exec(compile(block, str(PAGE), "exec"), {})
