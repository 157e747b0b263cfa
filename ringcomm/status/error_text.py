"""The text of an uncaught error: frames of the user and of other libraries, but not ringcomm's.

The error stays as it is, for code that catches it. RINGCOMM_TRACEBACK=full shows all frames, and so
does a bug of ringcomm.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from itertools import groupby
from types import TracebackType
from typing import Final

from ringcomm.config import shows_all_frames

OWN_FILES: Final = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_STARTERS: Final = ("<frozen runpy>", "<frozen importlib")
_STARTING_FILES: Final = (os.sep + "runpy.py", os.path.join(os.sep, "importlib", "__init__.py"))
_OF_BUGS: Final = (
    LookupError,
    AttributeError,
    NameError,
    ArithmeticError,
)  # not of a wrong argument


def text_of_error(error: BaseException) -> str:
    """Return what Python would print, without ringcomm's frames and those of its imports."""
    if not hides_frames(error):
        said = io.StringIO()
        with contextlib.redirect_stderr(said):  # with what traceback lacks: "Did you mean"
            sys.__excepthook__(type(error), error, error.__traceback__)
        return said.getvalue()
    shown = traceback.TracebackException.from_exception(error)
    _fold(shown)
    return "".join(shown.format())


def hides_frames(error: BaseException) -> bool:
    """Return True if text_of_error() has less than Python would print."""
    if shows_all_frames() or _is_bug(error):
        return False
    shown = traceback.TracebackException.from_exception(error, lookup_lines=False)
    return any(_is_own(frame.filename) for each in _chain(shown) for frame in each.stack)


def place_of_thread(ident: int) -> str | None:
    """Return "train.py:12", where the user's code is in a thread; None if that has ended."""
    frame = sys._current_frames().get(ident)
    place = None
    while frame is not None:
        path = frame.f_code.co_filename
        if not _is_own_or_starts(path) and path != threading.__file__:
            here = f"{_near(path)}:{frame.f_lineno}"
            if not is_of_library(path):
                return here
            place = place or here
        frame = frame.f_back
    return place


def is_of_library(filename: str) -> bool:
    return "site-packages" in filename


def _near(path: str) -> str:
    with contextlib.suppress(OSError):  # the working folder was removed
        inside = os.path.join(os.getcwd(), "")
        return path.removeprefix(inside)
    return path


def was_raised_by_code(trace: TracebackType | None) -> bool:
    """Return True if a `raise` raised the error with this trace, not a signal or another call."""
    if trace is None:
        return False
    from opcode import opname  # only errors need it

    innermost = _innermost(trace)
    code = innermost.tb_frame.f_code.co_code
    return opname[code[innermost.tb_lasti]] == "RAISE_VARARGS"


def _innermost(trace: TracebackType) -> TracebackType:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _is_bug(error: BaseException) -> bool:
    """Return True if code of ringcomm failed without a `raise`, or by an assertion."""
    trace = error.__traceback__
    if trace is None or not _is_own(_innermost(trace).tb_frame.f_code.co_filename):
        return False
    is_accident = isinstance(error, _OF_BUGS) and not was_raised_by_code(trace)
    return is_accident or isinstance(error, AssertionError)


def _chain(shown: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    yield shown
    for each in (shown.__cause__, shown.__context__, *(shown.exceptions or ())):
        if each is not None:
            yield from _chain(each)


def _fold(shown: traceback.TracebackException) -> None:
    """Take frames of ringcomm out, also of the errors from which this one came.

    Of those, one that rose in ringcomm alone keeps its text if it is a cause, and goes if it was
    only being handled.
    """
    if kept := list(_of_others(shown.stack)):
        shown.stack = traceback.StackSummary.from_list(kept)
    for each in (shown.__cause__, shown.__context__):
        if each is not None:
            _fold_earlier(each)
    context = shown.__context__
    if context is not None and shown.__cause__ is None and not context.stack:
        shown.__context__ = context.__cause__ or context.__context__
    for each in shown.exceptions or ():
        _fold(each)


def _fold_earlier(shown: traceback.TracebackException) -> None:
    has_frames = bool(shown.stack)
    _fold(shown)
    if has_frames and not list(_of_others(shown.stack)):
        shown.stack = None  # type: ignore[assignment]  # no header is printed either


def _of_others(stack: traceback.StackSummary) -> Iterator[traceback.FrameSummary]:
    for is_ours, frames in groupby(stack, lambda each: _is_own_or_starts(each.filename)):
        run = list(frames)
        if not is_ours or not any(_is_own(each.filename) for each in run):
            yield from run


def _is_own_or_starts(filename: str) -> bool:
    return _is_own(filename) or filename.startswith(_STARTERS) or filename.endswith(_STARTING_FILES)


def _is_own(filename: str) -> bool:
    return filename.startswith(OWN_FILES)
