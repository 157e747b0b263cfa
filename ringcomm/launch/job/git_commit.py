"""The git commit of a folder, read from git's own files: no program is started for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ringcomm.regular_files import BrokenFileError, read_regular

_COMMIT: Final = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_MOST: Final = 1 << 20  # bytes of a file of git that are read


def commit_of(folder: Path) -> str:
    """Return the commit that is checked out in the folder or one above it; "" if none is."""
    try:
        for parent in (folder, *folder.parents):
            if (parent / ".git").exists():
                return _head_of(parent / ".git")
    except (OSError, BrokenFileError, UnicodeDecodeError, ValueError):
        pass
    return ""


def _head_of(git: Path) -> str:
    if git.is_file():  # of a worktree, or a submodule
        git = git.parent / _read(git).decode().removeprefix("gitdir:").strip()
    head = _read(git / "HEAD").strip()
    if not head.startswith(b"ref:"):
        return _commit(head)
    ref = head[4:].strip().decode()
    shared = git / "commondir"
    common = git / _read(shared).decode().strip() if shared.exists() else git
    for path in (git / ref, common / ref):
        if path.exists():
            return _commit(_read(path).strip())
    for line in _read(common / "packed-refs").splitlines():
        commit, _, name = line.partition(b" ")
        if name == ref.encode():
            return _commit(commit)
    return ""


def _read(path: Path) -> bytes:
    return read_regular(path, _MOST)


def _commit(text: bytes) -> str:
    return text.decode() if _COMMIT.fullmatch(text) else ""
