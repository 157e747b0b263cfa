"""What tests/late_imports keeps out of ranks is there once somebody asks for it."""

import os
import shutil
import sys

import pytest
from harness import LATE_IMPORTS, run_command


@pytest.fixture
def run(tmp_path):
    """Run Python with a copy of that folder, which has kept nothing yet."""
    (tmp_path / "late").mkdir()
    shutil.copy(LATE_IMPORTS / "sitecustomize.py", tmp_path / "late")

    def run(code):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        done = run_command(
            [sys.executable, "-W", "error", "-c", code],
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": str(tmp_path / "late")},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


POINT = """
from dataclasses import dataclass, field
import sys
@dataclass(frozen=True, order=True)
class Point:
    x: int
    y: list = field(default_factory=list, compare=False)
    DEFAULT
try:
    Point(1).x = 2
except AttributeError as error:
    print(type(error).__name__)
print(Point(1, [2]), Point(1, [2]) == Point(1, [3]), Point(1) < Point(2), hash(Point(1)) != 0)
print(sys.modules["dataclasses"].exec.__self__.grown)
"""


def test_a_kept_method_of_a_dataclass_is_the_one_that_was_compiled(run):
    first, second = run(POINT.replace("DEFAULT", "")), run(POINT.replace("DEFAULT", ""))
    assert "FrozenInstanceError\nPoint(x=1, y=[2]) True True True" in first
    assert first == second.replace("set()", "{'__main__'}") != second  # it compiled none


def test_a_dataclass_that_has_changed_is_compiled_again(run):
    run(POINT.replace("DEFAULT", ""))
    changed = run(POINT.replace("DEFAULT", "z: int = 4"))
    assert "Point(x=1, y=[2], z=4)" in changed
    assert "{'__main__'}" in changed


def test_types_of_numpy_load_when_more_is_asked_than_annotations_use(run):
    run(
        "import sys, numpy\n"
        "from numpy.typing import ArrayLike, NDArray\n"
        "late = sys.modules['numpy._typing']\n"
        "assert type(late).__name__ == 'Typing'\n"
        "import numpy.typing\n"
        "assert issubclass(numpy.typing.NBitBase, object)\n"
        "assert numpy.typing.NDArray[int].__origin__ is numpy.ndarray\n"
        "assert numpy._typing is late\n"
        "assert 'numpy._typing._dtype_like' in sys.modules"
    )


def test_texts_for_help_load_when_they_are_asked_for(run):
    run(
        "import numpy, sys\n"
        "texts = sys.modules['numpy._core._add_newdocs']\n"
        "assert not numpy.ndarray.sum.__doc__\n"
        "assert texts.add_newdoc\n"
        "assert 'axis' in numpy.ndarray.sum.__doc__"
    )


def test_named_tuples_and_their_defaults_are_those_of_typing(run):
    run(
        "from __future__ import annotations\n"
        "from typing import Generic, NamedTuple, TypeVar\n"
        "T = TypeVar('T')\n"
        "class Pair(NamedTuple, Generic[T]):\n"
        "    x: T\n"
        "    y: list[int] | None = None\n"
        "    def sum(self): return self.x + self.y\n"
        "assert Pair(1) == (1, None) and Pair[int](x=1, y=2).sum() == 3\n"
        "assert Pair(1)._replace(y=3)._asdict() == {'x': 1, 'y': 3}\n"
        "assert repr(Pair(1)) == 'Pair(x=1, y=None)' and list(Pair.__annotations__) == ['x', 'y']\n"
        "assert Pair.__module__ == '__main__'"
    )


def test_programs_that_test_load_what_they_use_of_unittest(run):
    run(
        "import unittest.mock as mock\n"
        "import platform, textwrap, unittest\n"
        "assert type(unittest).__name__ == 'Package'\n"
        "assert textwrap.dedent(' x') == 'x' and platform.system()\n"
        "with mock.patch('os.getpid', lambda: 7):\n"
        "    assert __import__('os').getpid() == 7\n"
        "assert unittest.TestCase and unittest.mock is mock"
    )
