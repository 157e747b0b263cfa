"""Output of a run: the lines of its ranks, their tracebacks, and the launcher's lines. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Final

from ringcomm.ranks_as_text import ranges_of

_LINE_MAX: Final = 1 << 20  # bytes; a longer line is shown in parts
_RULE: Final = re.compile(rb"(?:-{60,}|={60,})\s*")
# mpirun's messages about the death of a rank, which the report makes superfluous.
_ABOUT_DEATHS: Final = re.compile(
    rb"prterun (?:detected|noticed)|mpirun (?:detected|noticed)|Primary job +terminated|"
    rb"BAD TERMINATION|EXIT STRING|prterun has exited|mpirun has exited"
)
_AFTER_MPICHS_BOX: Final = (
    b"YOUR APPLICATION TERMINATED WITH",
    b"This typically refers to a problem with your application",
    b"Please see the FAQ page for debugging suggestions",
)


@dataclass
class LinesOf:
    """Cuts the output of one rank into whole lines, and puts its number before each.

    A progress bar ends its lines by a carriage return, which is kept.
    """

    prefix: bytes
    _rest: bytes = b""

    def add(self, data: bytes) -> bytes:
        *lines, self._rest = re.split(rb"(?<=[\n\r])", self._rest + data)
        if len(self._rest) >= _LINE_MAX:
            lines.append(self._rest + b"\n")
            self._rest = b""
        return b"".join(_marked(self.prefix, line) for line in lines)

    def flush(self) -> bytes:
        rest, self._rest = self._rest, b""
        return _marked(self.prefix, rest + b"\n") if rest else b""


def _marked(prefix: bytes, line: bytes) -> bytes:
    bare = line.rstrip(b"\n\r")
    return prefix + line if bare else line


def prefix_of(ranks: Collection[int]) -> bytes:
    return f"[{ranges_of(ranks)}] ".encode()


_HEADER: Final = b"Traceback (most recent call last):\n"
_BETWEEN: Final = (  # one error and the next, with an empty line before and after
    b"During handling of the above exception, another exception occurred:\n",
    b"The above exception was the direct cause of the following exception:\n",
)
_OF_THREAD: Final = re.compile(rb"Exception in thread .*:\n")
_HELD_S: Final = 1.0


@dataclass
class Tracebacks:
    """Shows a traceback once that several ranks print within a second, as one of these ranks.

    From its first line on, what such a rank prints is held back for a second.
    """

    _held: dict[int, bytes] = field(default_factory=dict)
    _since: dict[int, float] = field(default_factory=dict)

    def add(self, rank: int, lines: bytes, now: float) -> bytes:
        """Take whole lines of a rank, as LinesOf has made them; return those to be shown."""
        shown = b""
        if rank not in self._held:
            found = _first_line(prefix_of([rank])).search(lines)
            if found is None:
                return lines
            shown, lines = lines[: found.start()], lines[found.start() :]
            self._held[rank], self._since[rank] = b"", now
        self._held[rank] += lines
        return shown + (self._released(rank, now) if len(self._held[rank]) > _LINE_MAX else b"")

    def due(self, now: float) -> bytes:
        """Return what has been held for a second."""
        shown = b""
        for rank in [rank for rank, since in self._since.items() if now >= since + _HELD_S]:
            if now >= self._since.get(rank, now) + _HELD_S:  # not released with another one
                shown += self._released(rank, now)
        return shown

    def flush(self) -> bytes:
        shown = b""
        while self._held:
            shown += self._released(min(self._held, key=self._since.__getitem__), 0.0)
        return shown

    def _released(self, rank: int, now: float) -> bytes:
        bare = {each: _bare_lines(each, lines) for each, lines in self._held.items()}
        first = bare[rank]
        block = first[: _length_of_traceback(first)]
        alike = {each: bare[each] for each in bare if bare[each][: len(block)] == block}
        prefix = prefix_of(alike)
        shown = b"".join(_marked(prefix, line) for line in block)
        for each, lines in alike.items():
            del self._held[each], self._since[each]
            own = prefix_of([each])
            shown += self.add(each, b"".join(_marked(own, x) for x in lines[len(block) :]), now)
        return shown


def error_of_log(data: bytes) -> list[str]:
    """Return the innermost frame and the text of the last traceback in a log; [] without one."""
    lines = data.splitlines(keepends=True)
    starts = [n for n, line in enumerate(lines) if line == _HEADER]
    if not starts:
        return []
    block = lines[starts[-1] :]
    block = block[: _length_of_traceback(block)]
    texts = [line.decode(errors="replace").rstrip() for line in block]
    frames = [text.strip() for text in texts if text.startswith('  File "')]
    error = [text for text in texts[1:] if not text.startswith((" ", "\t"))]
    return frames[-1:] + error if error else []


@cache
def _first_line(prefix: bytes) -> re.Pattern[bytes]:
    kinds = re.escape(_HEADER) + b"|" + _OF_THREAD.pattern
    return re.compile(b"^" + re.escape(prefix) + b"(?:" + kinds + b")", re.MULTILINE)


def _bare_lines(rank: int, lines: bytes) -> list[bytes]:
    prefix = prefix_of([rank])
    return [line.removeprefix(prefix) for line in lines.splitlines(keepends=True)]


def _length_of_traceback(lines: Sequence[bytes]) -> int:
    """Return the number of lines, with indented ones of the error's text, but no others of it."""
    n = int(bool(lines[1:]) and _OF_THREAD.fullmatch(lines[0]) is not None)
    while n < len(lines):
        n += 1
        while n < len(lines) and lines[n].startswith(b" "):
            n += 1
        n = min(n + 1, len(lines))
        while n < len(lines) and lines[n].startswith((b" ", b"\t")):
            n += 1
        head, between, *more = [*lines[n : n + 4], b"", b""]
        if head != b"\n" or between not in _BETWEEN or more[1] != _HEADER:
            break
        n += 3
    return n


@dataclass
class LauncherText:
    """Sorts the launcher's output into lines to show at once and messages about dead ranks.

    Messages are held back, because the report of the run says more. If there is none, they are
    shown in the end.
    """

    held: list[bytes] = field(default_factory=list)
    _block: list[bytes] | None = None  # lines since a rule that began a message
    _rest: bytes = b""

    def add(self, data: bytes) -> bytes:
        *lines, self._rest = (self._rest + data).split(b"\n")
        return b"".join(self._shown([line + b"\n" for line in lines]))

    def flush(self) -> bytes:
        rest, self._rest = self._rest, b""
        shown = b"".join(self._shown([rest + b"\n"] if rest else []))
        block, self._block = self._block, None
        return shown + b"".join(block or [])

    def _shown(self, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            is_rule = _RULE.fullmatch(line) is not None
            if self._block is not None:
                self._block.append(line)
                if is_rule:
                    yield from self._judged(self._block)
                    self._block = None
            elif is_rule:
                self._block = [line]
            elif line.startswith(_AFTER_MPICHS_BOX) or (self.held and not line.strip()):
                self.held.append(line)
            else:
                yield line

    def _judged(self, block: list[bytes]) -> list[bytes]:
        if _ABOUT_DEATHS.search(b"".join(block)):
            self.held += block
            return []
        return block
