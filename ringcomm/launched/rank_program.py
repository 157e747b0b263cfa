"""Becomes the program of a rank, with torch's variables and with the rank's log as its output.

    python -I -S rank_program.py RUN_FOLDER PROGRAM ARGUMENT...

Imports the standard library alone, and little of that: each rank starts with it.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Mapping, MutableMapping
from typing import Final

# As in ringcomm.launched.child_marks.
RUN_FOLDER: Final = "RINGCOMM_RUN_FOLDER"
RUN_FOLDER_ID: Final = "RINGCOMM_RUN_FOLDER_ID"
# The variables in which launchers tell a rank its place. RANK and so on are torch's names.
_SOURCES: Final = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
_PRELOAD: Final = "LD_PRELOAD"
_DOOR: Final = "/ringcomm-launcher-door.so"  # as in ringcomm.launched.launcher_door
_CONFIG_NBYTES: Final = 64 << 20
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126  # as in shells


def places(environ: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE and so on, as far as the launcher gives them."""
    found = {}
    for name, sources in _SOURCES.items():
        texts = (environ.get(source, "") for source in sources)
        if text := next((each for each in texts if each), ""):
            found[name] = text
    return found


def slurm_places(environ: Mapping[str, str], node: int | None = None) -> dict[str, str]:
    """Return Slurm's variables of this rank's place, as srun would have set them; {} elsewhere.

    mpirun passes those of the batch step on, which say that each rank is rank 0. Lightning and
    Accelerate go by them.

    Args:
        environ: the environment of the rank.
        node: index of its host among those of the job, None if that is not known.
    """
    if "SLURM_JOB_ID" not in environ:
        return {}
    found = places(environ)
    wanted = {
        "SLURM_PROCID": found.get("RANK"),
        "SLURM_NTASKS": found.get("WORLD_SIZE"),
        "SLURM_LOCALID": found.get("LOCAL_RANK"),
        "SLURM_NODEID": None if node is None else str(node),
    }
    return {name: text for name, text in wanted.items() if text is not None}


def say_place_as_srun_would(node: int, environ: MutableMapping[str, str] = os.environ) -> None:
    environ.update(slurm_places(environ, node))


def _node_in(folder: str, host: str) -> int | None:
    """Return the index of a host among those of the run."""
    import json  # takes 5 ms

    try:
        opened = os.open(f"{folder}/run.json", os.O_RDONLY | os.O_NONBLOCK)  # of a pipe
        with open(opened, "rb") as file:
            hosts = json.loads(file.read(_CONFIG_NBYTES))["hosts"]
        names = [each.rpartition(":")[0] for each in hosts]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    shorts = [name.partition(".")[0] for name in names]
    if host in names:
        return names.index(host)
    short = host.partition(".")[0]
    return shorts.index(short) if shorts.count(short) == 1 else None


def _unescaped(argument: str) -> str:
    r"""Return ":" for r"\:", which stands for it: launchers part commands at ":"."""
    is_escaped = argument.startswith("\\") and argument.lstrip("\\") == ":"
    return argument[1:] if is_escaped else argument


def main(folder: str, program: list[str], environ: MutableMapping[str, str] = os.environ) -> None:
    program = [_unescaped(each) for each in program]
    environ.update(places(environ))
    if "SLURM_JOB_ID" in environ:
        environ.update(slurm_places(environ, _node_in(folder, os.uname().nodename)))
    _take_back_door(environ)
    environ.pop(RUN_FOLDER_ID, None)  # of the job that has started this one
    if not _log_to(folder, environ):
        environ.pop(RUN_FOLDER, None)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"ringcomm run: {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        code = _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        os._exit(code)


def _take_back_door(environ: MutableMapping[str, str]) -> None:
    """Take what is for the launcher alone from LD_PRELOAD."""
    left = [each for each in environ.pop(_PRELOAD, "").split(":") if not each.endswith(_DOOR)]
    if any(left):
        environ[_PRELOAD] = ":".join(left)


def _log_to(folder: str, environ: MutableMapping[str, str]) -> bool:
    """Redirect stdout and stderr to this rank's log, and report this rank to the run.

    If this host does not see the folder, they stay with the launcher, and this returns False.
    """
    rank, host = environ.get("RANK", "0"), os.uname().nodename
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
    try:
        opened = _open_own(folder)
        _require_run(folder, opened)
        log = os.open(f"rank-{rank}.log", flags | os.O_APPEND, 0o644, dir_fd=opened)
    except OSError as error:
        if environ.get("LOCAL_RANK", "0") == "0":
            print(
                f"ringcomm run: host {host} does not see {folder} ({error.strerror}): the output "
                "of its ranks is in launcher.log, and mpirun's exit code decides",
                file=sys.stderr,
                flush=True,
            )
        return False
    with open("/proc/self/stat", "rb") as stat:
        start = stat.read().rpartition(b")")[2].split()[19]
    os.dup2(log, 1)  # before the record, which counts for a process that writes to the log
    os.dup2(log, 2)
    os.close(log)
    record = os.open(f"rank-{rank}.at", flags | os.O_TRUNC, 0o644, dir_fd=opened)
    with open(record, "wb") as file:  # as in ringcomm.launched.rank_process
        file.write(b"%d %s %s\n" % (os.getpid(), os.fsencode(host), start))
    facts = os.fstat(opened)
    identity = f"{facts.st_dev}:{facts.st_ino}"
    os.close(opened)
    environ[RUN_FOLDER] = f"{os.getpid()} {folder}"
    environ[RUN_FOLDER_ID] = identity
    if environ.get("LOCAL_RANK") == "0" and environ.get("LOCAL_WORLD_SIZE") != environ.get(
        "WORLD_SIZE"
    ):
        _report_to_other_hosts(folder)
    return True


def _open_own(folder: str) -> int:
    """Open the folder of the run. Raises OSError, also if others decide what is in it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    facts = os.fstat(opened)  # as in ringcomm.launch.job.run_folder
    if facts.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"which belongs to user {facts.st_uid}")
    if facts.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, "which every user can write")
    return opened


def _require_run(folder: str, opened: int) -> None:
    """Raise OSError if a folder is not that of the run, but another one of the same name.

    The owner of its parent may have put the folder of another run there, which has another name.
    """
    config = os.open("run.json", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=opened)
    with open(config, "rb") as file:
        text = file.read(_CONFIG_NBYTES)
    name = f'"{folder}"'
    if not (folder.isascii() and folder.isprintable()) or {*folder} & {*'"\\'}:
        import json  # takes 5 ms

        name = json.dumps(os.fsencode(folder).decode(errors="surrogateescape"))
    if f'\n  "folder": {name}'.encode() not in text:
        raise OSError(errno.ESTALE, "it is that of another run")


def _report_to_other_hosts(folder: str) -> None:
    """Start the process that shows this host's ranks to `ringcomm top` on other hosts.

    It is no child of the rank, and ends after the ranks of this host.
    """
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.closerange(3, 1 << 10)
    environ = {"PATH": os.environ.get("PATH", "")}  # it must not seem to be a rank
    module = "ringcomm.launch.watch.other_hosts"
    try:
        os.execve(sys.executable, [sys.executable, "-I", "-m", module, folder], environ)
    finally:
        os._exit(_NOT_EXECUTABLE)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
