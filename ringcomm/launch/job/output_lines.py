"""Output of a run: the lines of its ranks, and those of the launcher. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

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
        return b"".join(self._marked(line) for line in lines)

    def flush(self) -> bytes:
        rest, self._rest = self._rest, b""
        return self._marked(rest + b"\n") if rest else b""

    def _marked(self, line: bytes) -> bytes:
        bare = line.rstrip(b"\n\r")
        return self.prefix + line if bare else line


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
