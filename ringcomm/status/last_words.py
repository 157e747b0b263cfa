"""Sees to it that a rank that ends says how: hooks on every way out of Python.

They are bound to the rank's own pid. A forked child (a DataLoader worker) inherits them and must
not speak for the rank, nor be stopped by it.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from ringcomm._core import StatusPage
from ringcomm.errors import PeerFailedError
from ringcomm.status.page import Ending

_OWN_FILES = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FRAMES = 3
_REPORT_S = 1.0


@dataclass(frozen=True)
class Failure:
    """A rank's own account of its end.

    Attributes:
        reason: in words, for the others ("raised ValueError: boom").
        blames: the rank whose failure this one followed; None if it failed by itself.
    """

    reason: str
    blames: int | None = None


class LastWords:
    """Records this rank's failure on its page and tells `on_failure`, once.

    Attributes:
        failure: what was recorded; None while all is well. sys.exit(n) counts until take_back().
    """

    def __init__(self, page: StatusPage, on_failure: Callable[[Failure], None]) -> None:
        self.failure: Failure | None = None
        self._page = page
        self._on_failure = on_failure
        self._pid = os.getpid()
        self._is_armed = True
        self._is_soft = False
        self._excepthook = sys.excepthook
        self._thread_hook = threading.excepthook
        self._sys_exit = sys.exit
        self._os_exit = os._exit
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        sys.exit = self._on_sys_exit
        os._exit = self._on_os_exit
        page.record_this_process()

    def disarm(self) -> None:
        """After shutdown(): an end without a word is in order now; a failure is still recorded."""
        self._is_armed = False
        self._on_failure = _say_nothing

    def wait_for_report(self) -> None:
        """Return when the guardian has said who failed, after a second at the latest.

        As soon as a rank ends, mpirun ends the others and closes the guardian's output.
        """
        self._page.wait_for_report(_REPORT_S)

    def take_back(self) -> None:
        """The program goes on, so the sys.exit(n) that was recorded has been caught."""
        if self._is_soft:
            self.failure, self._is_soft = None, False

    def _is_rank(self) -> bool:
        return os.getpid() == self._pid

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if not self._is_rank():
            self._excepthook(kind, error, trace)
            return
        self._record_exception(error)
        if isinstance(error, PeerFailedError):
            print(f"ringcomm: stopped{_place(error)}: {error}", file=sys.stderr, flush=True)
        else:
            self._excepthook(kind, error, trace)

    def _on_thread_exception(self, args: threading.ExceptHookArgs, /) -> None:
        self._thread_hook(args)
        if self._is_rank() and args.exc_value is not None and args.exc_type is not SystemExit:
            self._record_exception(args.exc_value)

    def _record_exception(self, error: BaseException) -> None:
        lines = _last_frames(error) + traceback.format_exception_only(error)[-1].splitlines()[:1]
        words = (type(error).__name__, "\n".join(lines), _whole(error))
        if isinstance(error, PeerFailedError):
            self._page.record_end(Ending.PEER_FAILED, error.rank, *words)
            self._tell(Failure(error.reason, error.rank))
            return
        is_interrupt = isinstance(error, KeyboardInterrupt)
        self._page.record_end(Ending.INTERRUPTED if is_interrupt else Ending.EXCEPTION, 1, *words)
        self._tell(Failure(f"raised {lines[-1]}"))

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        code = status if isinstance(status, int) else int(status is not None)
        is_main = threading.current_thread() is threading.main_thread()
        if code != 0 and is_main and self._is_rank() and self.failure is None:
            where = _line_of(sys._getframe(1))
            self._page.record_end(Ending.SYS_EXIT, code, "SystemExit", where, "")
            # It may be caught: the others hear of it when this process really ends.
            self.failure, self._is_soft = Failure(f"called sys.exit({code})"), True
        self._sys_exit(status)

    def _on_os_exit(self, status: int) -> NoReturn:
        if self._is_rank() and self._is_armed:
            where = _line_of(sys._getframe(1))
            self._page.record_end(Ending.OS_EXIT, status, "os._exit", where, "")
            self._tell(Failure(f"called os._exit({status}) before shutdown()"))
            self.wait_for_report()
            # MPICH's mpiexec reports a job as good when a rank ends so in its middle (measured).
            status = status or 1
        self._os_exit(status)

    def _tell(self, failure: Failure) -> None:
        if self.failure is None or self._is_soft:
            self.failure, self._is_soft = failure, False
            self._on_failure(failure)


def _say_nothing(_: Failure) -> None:
    return


def _whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _line_of(frame: Any) -> str:
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def _last_frames(error: BaseException) -> list[str]:
    """Return where the user's own code was, innermost last, without frames of this library."""
    frames = [
        f'File "{f.filename}", line {f.lineno}, in {f.name}'
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith(_OWN_FILES)
    ]
    return frames[-_FRAMES:]


def _place(error: BaseException) -> str:
    frames = _last_frames(error)
    return f" at {frames[-1]}" if frames else ""
