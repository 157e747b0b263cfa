"""One fault, and how it is planted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

CATEGORIES = (
    "order",
    "cache",
    "dtype",
    "fault",
    "optimizer",
    "ps",
    "gpu",
    "node",
    "wire",
    "client",
)


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: for the command line.
        category: one of CATEGORIES.
        file: within ringcomm/.
        old: text that occurs in it once.
        new: what stands there instead.
        harm: what a user would suffer.
        targets: the tests that are most likely to catch it, within tests/.
    """

    name: str
    category: str
    file: str
    old: str
    new: str
    harm: str
    targets: tuple[str, ...]

    def planted(self, root):
        """Return the file to change, in the checkout `root`, and its faulty text.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        path = root / "ringcomm" / self.file
        text = path.read_text()
        n = text.count(self.old)
        if n != 1:
            raise ValueError(f"{self.name}: its text occurs {n} times in ringcomm/{self.file}")
        return path, text.replace(self.old, self.new)


@dataclass(frozen=True)
class CppMutation(Mutation):
    """One fault; `file` is a folder of csrc/, for what is where within it may change.

    Attributes:
        stress: programs of csrc/stress that may catch it, each with its arguments.
    """

    stress: tuple[tuple[str, ...], ...] = ()

    def planted(self, root: Path) -> tuple[Path, str]:
        """Return the file to change and its faulty text.

        Raises:
            ValueError: `old` does not occur exactly once in the folder.
        """
        files = sorted((root / "csrc" / self.file).glob("*.[ch]pp"))
        found = {path: n for path in files if (n := path.read_text().count(self.old))}
        if list(found.values()) != [1]:
            places = {path.name: n for path, n in found.items()} or "nowhere"
            raise ValueError(f"{self.name}: its text occurs in csrc/{self.file}: {places}")
        (path,) = found
        return path, path.read_text().replace(self.old, self.new)
