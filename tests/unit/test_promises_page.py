"""Each promise of docs/promises.md has a test, which exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "---" not in line]


@pytest.mark.parametrize("path", sorted({path for path, _ in NAMED}))
def test_the_tests_that_are_named_are_there(path):
    tree = ast.parse((ROOT / path).read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for file, name in NAMED if file == path} <= there


def test_every_promise_names_a_test():
    promises = [line for line in ROWS if line != "| promise | test |"]
    assert len(promises) > 40
    assert [line for line in promises if "::test_" not in line] == []


def test_every_test_of_promises_is_named():
    tree = ast.parse((ROOT / "tests/unit/test_ps_promises.py").read_text())
    there = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    kept = {name for name in there if name.startswith("test_")}
    assert kept - {name for _, name in NAMED} <= {
        "test_steps_are_counted_and_do_not_go_back",
        "test_an_updater_of_another_kind_is_refused_where_it_is_set",
    }
