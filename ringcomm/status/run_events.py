"""What happens in a job, for its watchers: on the status page, and in the folder of the run.

Each process has a file there, events-3.jsonl, with a line per event:
{"time": 1795637.25, "kind": "recovery", "step": 17, "text": "..."}. The warnings of the log
"ringcomm" are events, too; a call of it may name the kind: extra={"event": "stall"}.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from typing import Final

from ringcomm._core import StatusPage
from ringcomm.launched.child_marks import create_run_file, run_file

WARNING: Final = "warning"  # the kind of a warning that names none; only the file has it
_log: Final = logging.getLogger("ringcomm")
_page: StatusPage | None = None


def begin_events(page: StatusPage) -> None:
    """Record the events of this process from now on; init() calls it."""
    global _page  # noqa: PLW0603 - one per process, as the status page
    _page = page
    _log.removeFilter(_record_warning)
    _log.addFilter(_record_warning)


def record_event(kind: str, text: str) -> None:
    """Record what has happened, for `ringcomm top` and in the folder of the run."""
    if _page is not None:
        _page.note_event(_whole(text))
        write_event(kind, text)


def write_event(kind: str, text: str) -> None:
    """Add an event to the file of this process; nothing happens without init() or a run.

    If the file cannot be written, as on a full disk, the event is not there: no training ends for
    that.
    """
    if _page is None or not (path := run_file(f"events-{_page.snapshot()['rank']}.jsonl")):
        return
    steps = (step for _, step, *_ in _page.scalars())
    step = max([int(_page.snapshot()["step"]), *steps])
    event = {"time": round(time.time(), 3), "kind": kind, "step": step, "text": _whole(text)}
    with contextlib.suppress(OSError):
        descriptor = create_run_file(path, os.O_APPEND)
        try:
            os.write(descriptor, f"{json.dumps(event)}\n".encode())
        finally:
            os.close(descriptor)


def _record_warning(record: logging.LogRecord) -> bool:
    """Record a warning, and let it pass: a filter of the log sees it whatever its handlers are."""
    if record.levelno >= logging.WARNING:
        kind = getattr(record, "event", WARNING)
        with contextlib.suppress(TypeError, ValueError):  # its text does not fit its arguments
            (write_event if kind == WARNING else record_event)(kind, record.getMessage())
    return True


def _whole(text: str) -> str:
    return text.encode(errors="replace").decode()  # lone surrogates
