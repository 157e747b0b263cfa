"""What the pages about parameter servers show must run."""

import re
from pathlib import Path

import pytest
from harness import run_ranks

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.ps.server import user_functions

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(page):
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)


class OfEachRank(dict):
    """Functions by name, which each rank registers, as in a process of its own."""

    def __contains__(self, name):
        return False


@pytest.mark.parametrize(
    "block", blocks_of("parameter_server.md"), ids=["dense", "rows", "function"]
)
def test_block_runs(block, monkeypatch):
    monkeypatch.setattr(user_functions, "_registered", OfEachRank())
    assert ends_of(block, 2) == ["trained", 0]


def test_the_program_of_the_page_for_beginners_runs(monkeypatch, capsys):
    monkeypatch.setenv("RINGCOMM_PS_SERVERS", "2")  # as by its command
    monkeypatch.setenv("RINGCOMM_PS_EVALUATORS", "1")
    [program] = blocks_of("servers_in_one_page.md")
    assert ends_of(program, 5) == ["trained", "trained", 0, 0, 0]
    assert capsys.readouterr().out.startswith("2 workers, error ")


def test_the_program_beside_that_of_another_library_runs():
    [program] = blocks_of("coming_from.md")
    assert ends_of(program, 3) == ["trained", "trained", 0]


def ends_of(program, size):
    code = compile(program, "a block of the page", "exec")

    def body(rank):
        try:
            exec(code, {})
        except SystemExit as end:  # of a server, or an evaluator
            return end.code
        finally:
            leave(engine(), "done")
        return "trained"

    return run_ranks(size, body)
