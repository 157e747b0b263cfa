"""What docs/parameter_server.md shows must run."""

import re
from pathlib import Path

import pytest
from harness import run_ranks

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.ps.server import user_functions

PAGE = Path(__file__).parents[2] / "docs" / "parameter_server.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


class OfEachRank(dict):
    """Functions by name, which each rank registers, as in a process of its own."""

    def __contains__(self, name):
        return False


@pytest.mark.parametrize("block", BLOCKS, ids=["dense", "rows", "function"])
def test_block_runs(block, monkeypatch):
    monkeypatch.setattr(user_functions, "_registered", OfEachRank())
    code = compile(block, str(PAGE), "exec")

    def body(rank):
        try:
            exec(code, {})
        except SystemExit as end:  # of the server
            return end.code
        finally:
            leave(engine(), "done")
        return "trained"

    assert run_ranks(2, body) == ["trained", 0]
