"""Shows on a terminal that a command still works. It needs rich; without it, nothing is shown.

Not for ranks: their output goes to the launcher, through a pipe or a terminal that nobody sees.
They print lines instead.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show a moving sign and `what` while the block runs, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    try:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner
    except ModuleNotFoundError:  # the extra `cli` is not installed
        yield
        return
    sign, console = Spinner("dots", text=what), Console(stderr=True)
    with Live(sign, console=console, transient=True, redirect_stdout=False, redirect_stderr=False):
        yield
