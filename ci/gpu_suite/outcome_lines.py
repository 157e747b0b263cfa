"""The lines by which a stage tells the suite its outcome; see stage_runner.py."""

from __future__ import annotations

import sys
from typing import NoReturn

SKIP = 77  # the exit code of a stage that prints "skip: REASON"


def figure(text: str) -> None:
    """Print the text of this stage's row in the table."""
    print(f"figure: {text}", flush=True)


def detail(line: str) -> None:
    """Print a line for the details below the table."""
    print(f"| {line}", flush=True)


def skip(reason: str) -> NoReturn:
    """End this stage as skipped; on all ranks, before rc.init()."""
    print(f"skip: {reason}", flush=True)
    sys.exit(SKIP)
