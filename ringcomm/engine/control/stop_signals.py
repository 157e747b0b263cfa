"""SIGTERM and SIGUSR1: whichever rank gets one, the job stops as after `ringcomm ctl JOB stop`.

Ranks that take commands propose it at their next step boundary. Others, such as servers, ask those.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Collection

from ringcomm._core import catch_stop_signals, release_stop_signals, stop_signal
from ringcomm.engine.control.controlled_engine import ControlledEngine
from ringcomm.engine.control.rounds import RoundMessage
from ringcomm.transport.control_header import ControlKind

_log = logging.getLogger("ringcomm")


class StopSignals:
    """The stop signals that this rank, or another one, has received.

    They are caught from the first step boundary on at which the program can save a checkpoint.
    Before, and in a program that cannot, they end the process as ever.

    Args:
        engine: of this rank.

    Attributes:
        has_stopped: this rank takes no commands, and those that do have stopped.
    """

    has_news = is_busy = is_streaming = False  # as a service: others make the loop poll

    def __init__(self, engine: ControlledEngine) -> None:
        self._engine = engine
        self._page = engine.page
        self._is_armed = self._is_asked = self._is_taken = False
        self._takers: list[int] = []  # ranks that take commands, if this one does not
        self.has_stopped = False

    def arm(self, members: Collection[int]) -> None:
        """Catch them, and have the ranks catch them that take no commands; members are others."""
        if not self._is_armed:
            self._is_armed = True
            catch_stop_signals()
            self._tell_others(members, RoundMessage.READY)

    def release(self) -> None:
        if self._is_armed:
            release_stop_signals()

    @property
    def has_come(self) -> bool:
        return self._is_armed and not self._is_taken and (self._is_asked or stop_signal() != 0)

    def take(self) -> bool:
        if not self.has_come:
            return False
        self._is_taken = True
        self._say()
        return True

    def tell_of_stop(self, members: Collection[int]) -> None:
        self._tell_others(members, RoundMessage.STOPPED)

    def hear(self, source: int, phase: RoundMessage) -> None:
        """Take a message of READY, ASKED or STOPPED; called in the progress loop."""
        if phase == RoundMessage.ASKED:
            self._is_asked = True
        elif phase == RoundMessage.STOPPED:
            self.has_stopped = True
        else:
            self._takers.append(source)
            if not self._is_armed:
                self._is_armed = True
                catch_stop_signals()
                self._engine.extensions.add_service(self)

    def poll(self, *, only_news: bool = False) -> bool:
        """Ask the ranks that take commands, if a signal has come; see Service."""
        if only_news or self._is_taken or stop_signal() == 0:
            return False
        self._is_taken = True
        self._say()
        gone = self._engine.watch.peers.gone
        for rank in self._takers:
            if rank not in gone:
                self._engine.watch.tell(rank, ControlKind.CONTROL, round=RoundMessage.ASKED)
        return True

    def _tell_others(self, members: Collection[int], phase: RoundMessage) -> None:
        engine = self._engine
        gone = engine.watch.peers.gone
        for rank in range(engine.job_size):
            if rank not in members and rank not in gone:
                engine.watch.tell(rank, ControlKind.CONTROL, round=phase)

    def _say(self) -> None:
        if not (number := stop_signal()):  # the rank that has got it has said so
            return
        name = signal.Signals(number).name
        text = f"{name}: the job saves a checkpoint after this step, and ends"
        _log.warning("%s", text)
        if self._page is not None:
            self._page.note_event(text)
