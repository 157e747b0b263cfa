"""A recorded algorithm under way, as whoever waits for messages sees it."""

from __future__ import annotations

from ringcomm._core import Loop, Run
from ringcomm.arrays.base import Bytes
from ringcomm.transport.base import ANY_SOURCE, WireFault


class Running:
    """Used like a message that is complete when the whole algorithm is.

    Args:
        run: what the wire's runner made.
        loop: what advances it.
        arguments: the buffers; they stay alive as long as this does.
    """

    is_in_cpp = True
    source = ANY_SOURCE

    def __init__(self, run: Run, loop: Loop, arguments: list[Bytes]) -> None:
        self._run = run
        self._loop = loop
        self._arguments = arguments

    def test(self) -> bool:
        """Return True once it is over. Raises WireFault."""
        if self._run.is_over and self._run.fault:
            raise WireFault(self._run.fault)
        return self._run.is_over

    def cancel(self) -> None:
        """Give it up: what it has posted is kept for ever."""
        self._loop.abandon(self._run)

    def next_move(self) -> NextMove:
        """Return what is complete as soon as it has gone on.

        A long operation that moves is not one that hangs: its deadline begins anew with each step.
        """
        return NextMove(self, self._run)


class NextMove:
    """Used like a message that is complete when another step was made, or none is left."""

    is_in_cpp = True
    source = ANY_SOURCE

    def __init__(self, running: Running, run: Run) -> None:
        self._running = running
        self._run = run
        self._seen = run.moves

    def test(self) -> bool:
        """Return True if it has moved since. Raises WireFault."""
        return self._running.test() or self._run.moves != self._seen

    def cancel(self) -> None:
        """Do nothing: the algorithm itself can be given up."""
