"""Shows on a terminal how far long work of ours is: of a command, or of one rank of a job.

A rank's own output goes through mpirun, which passes on whole lines only. So a rank draws on the
terminal of its launcher, if that runs on the same host; `ringcomm run` is one, too. Nothing is
shown where there is no terminal, or rich is not installed (the extra `cli`).
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from collections.abc import Container, Iterator
from typing import Any, Final

from ringcomm.config import environment
from ringcomm.launched.child_marks import run_file
from ringcomm.launched.launcher import launcher_terminal

_REDRAW_S: Final = 0.1
_ERASE: Final = "\r\x1b[2K"
_ERASE_REST: Final = "\x1b[K"


@contextlib.contextmanager
def progress_bar(
    what: str, total: float, *, shows: bool = True, after_s: float = 1.0
) -> Iterator[ProgressBar]:
    """Show a bar while the block runs.

    Args:
        what: text before the bar.
        total: of the work, in any unit.
        shows: False: nothing is drawn; for all ranks but one.
        after_s: work that ends within this time shows nothing.
    """
    bar = (_open(what, total, after_s) if shows else None) or ProgressBar()
    try:
        yield bar
    finally:
        bar.close()


class ProgressBar:
    """Says how far the work is. This one shows nothing: there is no terminal, or no rich."""

    def advance(self, amount: float) -> None:
        """Note that so much more is done; one thread at a time."""

    def over(self, line: str, descriptor: int = 1) -> str:
        """Return a line to print (1: on stdout, 2: on stderr) so that no bar stays behind it."""
        return line

    def close(self) -> None: ...


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show a moving sign and `what` while the block runs, if stderr is a terminal. Not for ranks.

    It is for work of which nobody knows how far it is.
    """
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


def _open(what: str, total: float, after_s: float) -> ProgressBar | None:
    path = launcher_terminal(2)
    if path is None or environment().get("TERM", "dumb") == "dumb":
        return None
    try:
        from rich import progress
        from rich.console import Console

        # Not to wait for a terminal that somebody has stopped; it does not become ours, either.
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except (ModuleNotFoundError, OSError):
        return None
    width = max((os.get_terminal_size(descriptor).columns or 80) - 1, 20)
    console = Console(file=io.StringIO(), force_terminal=True, width=width)
    bars = progress.Progress(
        progress.TextColumn("{task.description}"), progress.BarColumn(),
        progress.TaskProgressColumn(), progress.TimeRemainingColumn(), console=console,
    )  # fmt: skip
    bars.add_task(what, total=total)
    is_logged = bool(run_file(""))  # `ringcomm run` writes each line to a file, too
    ours = [] if is_logged else [each for each in (1, 2) if launcher_terminal(each) == path]
    return _Drawn(descriptor, bars, time.monotonic() + after_s, ours)


class _Drawn(ProgressBar):
    """One line at the bottom of a terminal; what others print there goes over it.

    Rich's live display is not used: it hides the cursor, which a rank that is killed leaves so,
    and has a thread, which takes time from ranks that measure.
    """

    def __init__(self, descriptor: int, bars: Any, draw_next: float, ours: Container[int]) -> None:
        self._descriptor, self._bars, self._draw_next = descriptor, bars, draw_next
        self._ours = ours  # of stdout (1) and stderr (2): those that end on this terminal
        self._is_drawn = False

    def advance(self, amount: float) -> None:
        [task] = self._bars.task_ids
        self._bars.update(task, advance=amount)
        now = time.monotonic()
        if now < self._draw_next:
            return
        self._draw_next = now + _REDRAW_S
        console = self._bars.console
        with console.capture() as captured:
            console.print(self._bars.get_renderable())
        self._write(_ERASE + captured.get().rstrip("\n") + "\r")
        self._is_drawn = True

    def over(self, line: str, descriptor: int = 1) -> str:
        return line + _ERASE_REST if descriptor in self._ours else line

    def close(self) -> None:
        if self._is_drawn:
            self._write(_ERASE)
        os.close(self._descriptor)

    def _write(self, text: str) -> None:
        """Write, also where programs in the background are stopped for that (stty tostop)."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(OSError):  # it is stopped, or gone
                os.write(self._descriptor, text.encode())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
