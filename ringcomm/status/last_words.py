"""Records how a rank ends, with a hook for each way in which Python can end.

The hooks act in the rank's own process only. A forked child, such as a DataLoader worker, inherits
them, but its end is not the rank's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import operator
import os
import sys
import threading
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, NoReturn

from ringcomm._core import StatusPage, record_this_rank_in
from ringcomm.errors import PeerFailedError
from ringcomm.launched.child_marks import run_file
from ringcomm.launched.launcher import launched_rank
from ringcomm.launched.rank_process import note_rank_process
from ringcomm.status.error_printer import print_error_of_thread
from ringcomm.status.error_text import OWN_FILES, is_of_library, was_raised_by_code
from ringcomm.status.page_enums import Ending

_FRAMES = 1  # the traceback has all
_REPORT_S = 1.0
_WHERE_BYTES = 1023  # the page's `where`
_WORD = 80


class Failure(NamedTuple):
    """A rank's own account of its end."""

    reason: str
    blames: int | None = None  # the process whose failure ended this rank, if any; see LastWords
    exit_code: int = 1


class LastWords:
    """Records a failure of this rank on its page; calls `on_failure` for the first one.

    Pages, and failures, have the numbers that the ranks had in the first view of the job.
    `blamed` returns this number for the rank that an error blames.
    """

    def __init__(
        self,
        page: StatusPage,
        on_failure: Callable[[Failure], None],
        blamed: Callable[[PeerFailedError], int] = lambda error: error.rank,
    ) -> None:
        self.failure: Failure | None = None
        self._page = page
        self._on_failure = on_failure
        self._blamed = blamed
        self._pid = os.getpid()
        self._earlier_error = getattr(sys, "last_value", None)
        self._is_armed = True
        self._excepthook, self._thread_hook = sys.excepthook, threading.excepthook
        self._sys_exit, self._os_exit = sys.exit, os._exit
        sys.excepthook = self._on_exception
        threading.excepthook = self._on_thread_exception
        sys.exit = self._on_sys_exit
        os._exit = self._on_os_exit
        self._undo_mpi_abort = self._hook_mpi_abort()
        page.record_this_process()
        note_rank_process()
        if path := run_file(f"rank-{launched_rank()}.end"):
            record_this_rank_in(os.fsencode(path))

    def disarm(self) -> None:
        """From now on, record nothing. Remove the hooks, unless others were set after them."""
        self._is_armed = False
        self._on_failure = lambda _: None
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._excepthook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._thread_hook
        if sys.exit == self._on_sys_exit:
            sys.exit = self._sys_exit
        if os._exit == self._on_os_exit:
            os._exit = self._os_exit
        self._undo_mpi_abort()
        self._undo_mpi_abort = lambda: None  # it refers to this object, which holds a descriptor

    def end_with(self, error: BaseException) -> None:
        """Record an error raised after the program's end, as if it had ended the program."""
        self._on_exception(type(error), error, error.__traceback__)

    def follow(self, process: int) -> None:
        """Record that this rank, whose program is over, exits with 1 because a process failed."""
        self._page.record_end(Ending.PEER_FAILED, process, "PeerFailedError", "", "")
        self.wait_for_report()

    def wait_for_report(self) -> None:
        """Return when the guardian has printed its report, or after a second.

        When this rank ends, mpirun ends the others and closes the guardian's output.
        """
        self._page.wait_for_report(_REPORT_S)

    def notice_unseen_exception(self) -> None:
        """Record the exception that ended the program, if a later excepthook hid it from ours.

        The interpreter stores the exception in sys.last_value before it calls a hook.
        """
        error: BaseException | None = getattr(sys, "last_value", None)
        if error is None or error is self._earlier_error or self.failure is not None:
            return
        if _ended_the_program(error):
            self._record_exception(error)

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
        if self._thread_hook is threading.__excepthook__:
            print_error_of_thread(args)
        else:
            self._thread_hook(args)
        if not self._is_rank() or args.exc_value is None or args.exc_type is SystemExit:
            return
        if args.thread is not None and args.thread.daemon and _is_of_full_disk(args.exc_value):
            return  # a thread that writes records, such as TensorBoard's: training does not need it
        self._record_exception(args.exc_value)

    def _record_exception(self, error: BaseException) -> None:
        lines = [*_last_frames(error), _headline(error)]
        where = _shortened("\n".join(lines))
        words = tuple(map(_clean, (type(error).__name__, where, _whole(error))))
        if isinstance(error, PeerFailedError):
            blamed = self._blamed(error)
            self._page.record_end(Ending.PEER_FAILED, blamed, *words)
            self._tell(Failure(error.reason, blamed))
            return
        is_interrupt = isinstance(error, KeyboardInterrupt) and not was_raised_by_code(
            error.__traceback__
        )
        self._page.record_end(Ending.INTERRUPTED if is_interrupt else Ending.EXCEPTION, 1, *words)
        self._tell(Failure(f"raised {lines[-1]}"))

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        is_main = threading.current_thread() is threading.main_thread()
        if status in (None, 0) or not is_main or not self._is_rank():
            self._sys_exit(status)
        raise _Exit(status, _line_of(sys._getframe(1)), self._on_real_exit)

    def _on_real_exit(self, code: int, where: str) -> None:
        self._page.record_end(Ending.SYS_EXIT, code, "SystemExit", where, "")
        self._tell(Failure(f"called sys.exit({code})", exit_code=code))

    def _on_os_exit(self, status: int) -> NoReturn:
        if self._is_rank() and self._is_armed:
            where = _line_of(sys._getframe(1))
            self._page.record_end(Ending.OS_EXIT, status, "os._exit", where, "")
            self._tell(Failure(f"called os._exit({status}) before shutdown()"))
            self.wait_for_report()
            # With 0, MPICH's mpiexec would report success (measured).
            status = status or 1
        self._os_exit(status)

    def _hook_mpi_abort(self) -> Callable[[], None]:
        """Record calls of mpi4py's Comm.Abort(); return a function that takes the hook away.

        MPI_Abort ends the other ranks by signals, and this one dies after some of them, so nobody
        else can tell that it came first.
        """
        mpi = sys.modules.get("mpi4py.MPI")  # absent where the ranks are threads
        if mpi is None:
            return lambda: None
        abort = mpi.Comm.Abort

        def on_abort(comm: Any, errorcode: int = 0) -> None:
            code = operator.index(errorcode)
            if self._is_rank() and self._is_armed:
                where = _line_of(sys._getframe(1))
                self._page.record_end(Ending.MPI_ABORT, code, "MPI_Abort", where, "")
                self._tell(Failure(f"called MPI_Abort({code})", exit_code=code))
                self.wait_for_report()
            abort(comm, code)

        def undo() -> None:
            if mpi.Comm.Abort is on_abort:
                _set_method(mpi.Comm, "Abort", abort)

        on_abort.__doc__ = abort.__doc__
        with contextlib.suppress(AttributeError, TypeError, ValueError):  # another mpi4py
            _set_method(mpi.Comm, "Abort", on_abort)
        return undo

    def _tell(self, failure: Failure) -> None:
        if self.failure is None:
            self.failure = failure
            self._on_failure(failure)


def _is_of_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _set_method(kind: type, name: str, method: Any) -> None:
    """Set a method of a type that is made in C, for which setattr() is refused."""
    (methods,) = gc.get_referents(kind.__dict__)
    methods[name] = method
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


class _Exit(SystemExit):
    """The exception of sys.exit(n). It calls `on_real_exit` if it ends the process.

    If the program does not catch it, the interpreter reads `code` while no Python code runs.
    """

    def __init__(self, status: Any, where: str, on_real_exit: Callable[[int, str], None]) -> None:
        super().__init__(status)
        self._status = status
        self._where = where
        self._on_real_exit = on_real_exit

    @property
    def code(self) -> Any:  # type: ignore[override]
        if _is_called_by_interpreter():
            code = self._status if isinstance(self._status, int) else 1
            self._on_real_exit(code, self._where)
        return self._status


def _is_called_by_interpreter() -> bool:
    try:
        sys._getframe(2)
    except ValueError:
        return True
    return False


def _ended_the_program(error: BaseException) -> bool:
    """Return True if the main program raised the error, not a callback whose error C printed."""
    trace = error.__traceback__
    if trace is None:
        return False
    outermost = trace.tb_frame
    return outermost.f_globals.get("__name__") == "__main__" or "runpy" in (
        outermost.f_code.co_filename
    )


def _headline(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the first error is more important
        text = "<its text cannot be shown>"
    first = (text.splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _shortened(text: str) -> str:
    """Return text that the page has room for, cut at a word, unless that is very long."""
    if len(data := text.encode(errors="replace")) <= _WHERE_BYTES:
        return text
    kept = data[: _WHERE_BYTES - len(" ...")].decode(errors="ignore")
    words, _, rest = kept.rpartition(" ")
    return f"{words if len(rest) < _WORD else kept} ..."


def _clean(text: str) -> str:
    """Return text that can be encoded: without lone surrogates."""
    return text.encode(errors="replace").decode()


def _whole(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


def _line_of(frame: Any) -> str:
    return f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}'


def _last_frames(error: BaseException) -> list[str]:
    """Return the frames of the user's code, innermost last, or else those of libraries."""
    trace = traceback.extract_tb(error.__traceback__)
    others = [f for f in trace if not f.filename.startswith((OWN_FILES, threading.__file__))]
    own = [f for f in others if not is_of_library(f.filename)]
    return [
        f'File "{f.filename}", line {f.lineno}, in {f.name}' for f in (own or others)[-_FRAMES:]
    ]


def _place(error: BaseException) -> str:
    frames = _last_frames(error)
    return f" at {frames[-1]}" if frames else ""
