"""The logs of all ranks of a run: the latest lines, what comes after them, and the whole."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from typing import Any, Final

from ringcomm.launch.dashboard.source import Source
from ringcomm.launch.watch.log_order import in_order, shown_line
from ringcomm.launch.watch.logs_command import Logs

_ALL: Final = 1 << 18  # bytes of a first answer, of all ranks together
_RANK: Final = 1 << 16  # bytes of one rank in an answer
_LINE: Final = 4000  # characters of a line that are shown
_CURSOR: Final = re.compile(r"(?:(0|[1-9][0-9]{0,8}):([0-9]{1,18}))")
_CURSOR_MAX: Final = 1 << 16


def lines_after(source: Source, cursor: str) -> dict[str, Any]:
    """Return the lines of all ranks that came after a cursor, and the next cursor.

    Args:
        source: the run.
        cursor: of the last answer; "": the latest lines are asked for.

    Returns:
        {"lines": [rank, text] of each, in the order of `ringcomm logs`; "cursor"}.
    """
    places = parse_cursor(cursor)
    found: dict[int, list[str]] = {}
    folder = source.folder
    if folder is None:
        return {"lines": [], "cursor": ""}
    with contextlib.suppress(OSError):  # the run was removed
        ranks = folder.ranks_with_log()
        most = _RANK if places else min(_RANK, _ALL // max(1, len(ranks)))
        is_over = folder.end() is not None
        for rank in ranks:
            found[rank], places[rank] = _lines(source, rank, places.get(rank), most, is_over)
    lines = [[rank, shown_line(line)[:_LINE]] for rank, line in in_order(found)]
    return {"lines": lines, "cursor": ",".join(f"{r}:{at}" for r, at in sorted(places.items()))}


def parse_cursor(text: str) -> dict[int, int]:
    """Return rank -> bytes that were read; what is no cursor is none."""
    if len(text) > _CURSOR_MAX:
        return {}
    found = (_CURSOR.fullmatch(each) for each in text.split(","))
    return {int(each[1]): int(each[2]) for each in found if each is not None}


def whole_log(source: Source) -> Iterator[str]:
    """Yield all that the ranks have written, as `ringcomm logs` prints it."""
    if source.folder is None:
        return
    with contextlib.closing(Logs(source.folder, (), None)) as logs, contextlib.suppress(OSError):
        for rank, line in in_order(logs.until_now()):
            yield f"[{rank}] {shown_line(line)}\n"
        for rank, line in logs.rest():
            yield f"[{rank}] {shown_line(line)}\n"


def _lines(
    source: Source, rank: int, at: int | None, most: int, is_over: bool
) -> tuple[list[str], int]:
    with source.open_log(rank) or contextlib.nullcontext() as file:
        if file is None:
            return [], at or 0
        size = os.fstat(file.fileno()).st_size
        begin = max(0, size - most) if at is None else min(at, size)
        file.seek(begin)
        data = file.read(most)
        end = data.rfind(b"\n") + 1
        if (is_over and begin + len(data) >= size) or (not end and len(data) == most):
            end = len(data)  # the last line has no end; or it is a long one
        lines = data[:end].decode(errors="replace").removesuffix("\n").split("\n") if end else []
        if at is None and begin and len(lines) > 1:
            lines = lines[1:]  # the first one has lost its beginning
        return lines, begin + end
