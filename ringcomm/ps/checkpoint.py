"""Checkpoints: what all servers have at one moment, in files that survive whatever ends the job."""

from __future__ import annotations

import logging
import operator
import threading
import time
from pathlib import Path
from typing import Any

from ringcomm._version import __version__
from ringcomm.errors import RingcommError
from ringcomm.ps import checkpoint_files as files
from ringcomm.ps.checkpoint_files import Checkpoint
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future, require_timeout
from ringcomm.ps.job import Session, is_chief, session
from ringcomm.ps.moments import ask_all, asking, hold, new_id, pause, release
from ringcomm.ps.storing import COMMIT, FORGET, PREPARE

_log = logging.getLogger("ringcomm")


def save(
    path: str | Path,
    *,
    step: int | None = None,
    keep: int | None = 2,
    background: bool = True,
    timeout_s: float | None = None,
) -> Future[Path]:
    """Save all tables: values, the updaters' state, step counts, and whose pushes are in them.

    On the chief; the others may go on training meanwhile. Tables with rounds are saved as they are
    exactly between two rounds, each block of the others as it is at one instant. This returns when
    the servers have copied what is to be written: they need that much memory more until it is.
    What has not changed since the save before is neither copied nor written again.

    Args:
        path: a folder on a file system that all servers and the chief share; a checkpoint is a
            folder in it. Killed at any moment, the one before is what restore() finds.
        step: of the training; told again by restore().
        keep: how many complete checkpoints are kept, this one included; None: all.
        background: False: return when it is on disk.
        timeout_s: of the wait for a disk, in seconds; None: RINGCOMM_TIMEOUT_S. After a timeout the
            save goes on.

    Returns:
        A future of the checkpoint's own folder, done once it is complete. A save before that is
        still under way is waited for first. What a save has written that fails is removed; what
        one that was killed has left, by the next.

    Raises:
        RingcommError: this is not the chief, or is within ps.snapshot().
        OSError: path cannot be written. What only servers meet is raised by the future.
        CommTimeoutError: a disk, or a server, takes longer.
    """
    current = _require_chief("ps.save")
    limit_s = _limit_of(current, timeout_s)
    if keep is not None and operator.index(keep) < 1:
        raise ValueError(f"ps.save: keep is {keep}; it must be 1 or more, or None")
    step = None if step is None else operator.index(step)
    with current.saving:  # else two threads would have the same folder
        outer = _begin(current, Path(path).resolve(), step, keep, limit_s)
    if not background:
        outer.wait(limit_s)
    return outer


def _begin(
    current: Session, root: Path, step: int | None, keep: int | None, limit_s: float
) -> Future[Path]:
    """Let the servers copy what is to be written, and begin to write it."""
    _finish_last(current, limit_s)
    folder = files.new_folder(root)
    number = new_id(current)
    try:
        told = hold(current, number, save_to=str(root))
    except BaseException:
        release(current, number)
        files.discard(folder)
        raise
    release(current, number, is_taken=True)
    manifest = {
        "ringcomm": __version__,
        "step": step,
        "time": time.time(),
        "job": told.job,
        "rounds": told.rounds,
        "tables": told.tables,
    }
    outer = _write(current, number, folder, manifest, keep)
    if current.last_save is None:
        current.engine.extensions.before_leaving(
            lambda: _finish_last(current, _limit_of(current, None))
        )
    current.last_save = outer
    return outer


def restore(path: str | Path, *, timeout_s: float | None = None) -> dict[str, Any] | None:
    """Let all tables be what they were when the newest checkpoint was saved.

    On the chief, once all tables are open, while nobody pushes: let the others wait in rc.barrier()
    and pull afterwards. The number of servers and the size of blocks may be others than then; a
    number that a block has once (its steps) is then that of the slice with the most steps. If a
    file is damaged, a warning names it, and the checkpoint before is used.

    Args:
        path: as given to save().
        timeout_s: of the wait for the servers to read their files, in seconds; None:
            RINGCOMM_TIMEOUT_S.

    Returns:
        The manifest: "step", "time", "rounds" and so on; None if there is no checkpoint: then
        nothing was changed.

    Raises:
        ValueError: a table of the checkpoint is not open, or has another shape, dtype or updater;
            nothing was changed.
        BrokenFileError: no checkpoint can be used; nothing was changed.
        CommTimeoutError: a disk, or a server, takes longer; nothing was changed.
        RingcommError: this is not the chief.
    """
    current = _require_chief("ps.restore")
    limit_s = _limit_of(current, timeout_s)
    return _restore(current, Path(path).resolve(), limit_s, values_only=False)


def load(path: str | Path, *, timeout_s: float | None = None) -> dict[str, Any]:
    """Let tables begin with the values of the newest checkpoint: a pre-trained start.

    As restore(), but without the updaters' state and step counts, and for those of the open tables
    that the checkpoint has: their dtype and updater may be others, the shape may not.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: a shape is another one, or none of the tables is there; nothing was changed.
    """
    current = _require_chief("ps.load")
    limit_s = _limit_of(current, timeout_s)
    manifest = _restore(current, Path(path).resolve(), limit_s, values_only=True)
    if manifest is None:
        raise FileNotFoundError(f"ps.load: no complete checkpoint in {path}")
    return manifest


# --- save ---------------------------------------------------------------------------------------
def _write(
    current: Session, number: int, folder: Path, manifest: dict[str, Any], keep: int | None
) -> Future[Path]:
    """Let all servers write, and a thread of this process complete the checkpoint."""
    client = current.client
    outer: Future[Path] = Future(client, "save", 1, lambda: folder, client.timestamp())
    said = {"id": number, "folder": str(folder)}
    inner = [asking(current, Kind.SAVE, said, [server]) for server in range(client.n_servers)]
    written = threading.Semaphore(0)
    for each in inner:
        each.then(lambda _: written.release())

    def complete() -> None:
        for _ in inner:  # also after an error: what others still write could not be removed
            written.acquire()  # a job that dies meanwhile ends this process, too
        try:
            told = [each.wait()[0] for each in inner]
            files.write_manifest(folder, {**manifest, "servers": told})
            files.tidy(folder.parent, keep)
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
            files.discard(folder)
            outer.fail(error)
        else:
            outer.replied(-1)
        current.engine.nudge()

    threading.Thread(target=complete, name="ringcomm-ps-save", daemon=True).start()
    return outer


def _finish_last(current: Session, limit_s: float) -> None:
    """Wait for a save that is under way; what went wrong is its own future's to tell."""
    last = current.last_save
    if last is not None and not last.done():
        current.client.wait_for(last, limit_s)


# --- restore ------------------------------------------------------------------------------------
def _restore(
    current: Session, root: Path, limit_s: float, *, values_only: bool
) -> dict[str, Any] | None:
    _finish_last(current, limit_s)
    number = new_id(current)
    label = "ps.load" if values_only else "ps.restore"
    job = ""

    def attempt(checkpoint: Checkpoint) -> dict[str, Any]:
        said = {"id": new_id(current), "values_only": values_only}
        manifest = checkpoint.manifest
        prepare = {**said, "do": PREPARE, "folder": str(checkpoint.folder)}
        try:
            told = asking(current, Kind.RESTORE, prepare).wait(limit_s)
        except BaseException:
            ask_all(current, Kind.RESTORE, {**said, "do": FORGET})
            raise
        if told[0]["fresh"]:
            fresh = ", ".join(told[0]["fresh"])
            _log.warning("%s: %s stay as they are: %s has none", label, fresh, checkpoint.folder)
        commit = {**said, "do": COMMIT, "is_same_job": manifest["job"] == job}
        ask_all(current, Kind.RESTORE, commit)
        return manifest

    try:
        job = pause(current, number).job  # and nothing moves while servers read
        return files.first_usable(root, label, attempt)
    finally:
        release(current, number)


def _limit_of(current: Session, timeout_s: float | None) -> float:
    """Return a deadline in seconds: disks may take longer than servers that compute."""
    require_timeout("checkpoint", timeout_s)
    if timeout_s is not None:
        return timeout_s
    return current.engine.settings.timeout_or_inf


def _require_chief(label: str) -> Session:
    current = session()
    if not is_chief():
        raise RingcommError(
            f"{label}: worker {current.group.index} is not the chief. Call it if ps.is_chief()"
        )
    if current.snapshot:
        raise RingcommError(f"{label}: not within ps.snapshot(), which holds everything as it is")
    return current
