"""Marks of a rank's child processes: they are no ranks, and belong to this run."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, MutableMapping
from typing import Final

# Set by init(), so that child processes of a rank know that they are not ranks.
RANK_PROCESS: Final = "RINGCOMM_RANK_PROCESS"
# "PID FOLDER", set by `ringcomm run` for the rank that has this pid, and for its children.
RUN_FOLDER: Final = "RINGCOMM_RUN_FOLDER"
# "DEVICE:INODE" of that folder on this host: whoever owns its parent can put another in its place.
RUN_FOLDER_ID: Final = "RINGCOMM_RUN_FOLDER_ID"
# The file in it by which `ringcomm run` ends ranks that wait in init() for one that has ended.
LOST_BEFORE_INIT: Final = "lost-before-init"


def run_file(name: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of a file in the folder of this run; "" if `ringcomm run` did not start it.

    The processes of a job that a rank starts have the variable, too, but are not of this run.
    """
    pid, _, folder = environ.get(RUN_FOLDER, "").partition(" ")
    if not pid.isdigit() or (int(pid) != os.getpid() and _launcher_since(int(pid))):
        return ""
    return os.path.join(folder, name)


def create_run_file(path: str | os.PathLike[str], flags: int = os.O_TRUNC) -> int:
    """Return the descriptor of a file in the folder of this run, to be written; not a link's."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    folder, name = os.path.split(path)
    opened = open_run_folder(folder)
    try:
        return os.open(name, flags, 0o644, dir_fd=opened)
    finally:
        os.close(opened)


def open_run_folder(folder: str, environ: Mapping[str, str] = os.environ) -> int:
    """Return the descriptor of the folder of this run.

    Raises OSError, also if another has come in its place since the run has begun. The owner of its
    parent can do so, such as with the folder of another run.
    """
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    facts = os.fstat(opened)
    if environ.get(RUN_FOLDER_ID, "") in ("", f"{facts.st_dev}:{facts.st_ino}"):
        return opened
    os.close(opened)
    raise OSError(errno.ESTALE, "another folder is in the place of that of the run", folder)


def run_folder_id(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variable by which a process of this run knows its folder."""
    return {name: text for name, text in environ.items() if name == RUN_FOLDER_ID}


def mark_children_of_this_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    environ[RANK_PROCESS] = f"{os.getpid()} {_launch(environ)}"


def parent_rank_pid(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the pid of the rank that forked or started this process, else None."""
    pid, _, launch = environ.get(RANK_PROCESS, "").partition(" ")
    if not pid.isdigit() or int(pid) == os.getpid() or launch != _launch(environ):
        return None
    return None if _launcher_since(int(pid)) else int(pid)


def _launcher_since(pid: int) -> bool:
    # 6 ms, which `import ringcomm` spares who is no child.
    from ringcomm.launched.ancestors import launcher_since

    return launcher_since(pid)


def _launch(environ: Mapping[str, str]) -> str:
    """Return a text that identifies a launch. A job that a rank starts is another launch."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "SLURM_STEP_ID")
    return "/".join(environ.get(name, "-") for name in names)
