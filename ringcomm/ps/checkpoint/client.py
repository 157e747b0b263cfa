"""ps.save(), ps.restore() and ps.load(): the chief makes servers write and read checkpoints."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, overload

from ringcomm._version import __version__
from ringcomm.errors import PeerFailedError, RingcommError, ServerLostError
from ringcomm.progress_bar import progress_bar
from ringcomm.ps.checkpoint import files
from ringcomm.ps.checkpoint.arguments import (
    folder_of,
    require_keep,
    require_periods,
    step_of,
)
from ringcomm.ps.checkpoint.files import SavedCheckpoint
from ringcomm.ps.checkpoint.save_schedule import Periodic
from ringcomm.ps.client.future import Future, FutureOfAll, require_timeout
from ringcomm.ps.client.json_requests import ask_json, ask_leader, ask_servers, ignore
from ringcomm.ps.client.pauses import hold, new_id, pause, release
from ringcomm.ps.protocol.frame_meta import COMMIT, FORGET, LOOK, PREPARE
from ringcomm.ps.protocol.frames import FilesOption, FrameKind
from ringcomm.ps.session import Session, acts_as_chief, session
from ringcomm.status.run_events import record_event

_log = logging.getLogger("ringcomm")
_REDRAW_S: Final = 0.2  # of the bar
_NEWS_S: Final = 2.0  # of the wait for workers that wait in ringcomm


@overload
def save(
    path: str | Path,
    *,
    step: int | None = ...,
    keep: int | None = ...,
    background: bool = ...,
    timeout_s: float | None = ...,
) -> Future[Path]: ...


@overload
def save(
    path: str | Path,
    *,
    every_s: float | None = ...,
    every_steps: int | None = ...,
    keep: int | None = ...,
    timeout_s: float | None = ...,
) -> Future[Path] | None: ...


def save(
    path: str | Path,
    *,
    step: int | None = None,
    keep: int | None = 2,
    background: bool = True,
    timeout_s: float | None = None,
    every_s: float | None = None,
    every_steps: int | None = None,
) -> Future[Path] | None:
    """Save all tables: values, the updaters' state, step counts, and which pushes are in them.

    On the chief; the others may go on training meanwhile. Tables with rounds are saved as they are
    exactly between two rounds, each block of the others as it is at one instant. This returns when
    the servers have copied what is to be written; they need the memory for the copies until it is
    written. What has not changed since the save before is neither copied nor written again.

    With every_s= or every_steps= the chief saves by itself from now on, between two steps: at the
    end of ps.complete_step(), or of step() of the optimizer that was wrapped last, and the first
    time in the next one. Call it on every worker, so that it goes on if the chief dies. The others
    train on meanwhile, and so does the chief once the servers have copied. If one fails, a warning
    says so. While one is still being written, the next one waits for the end of a later step. After
    SIGTERM or SIGUSR1 to any rank, one is saved after the present step, and the job ends.

    Args:
        path: a folder on a file system that all servers and the chief share; a checkpoint is a
            folder in it. Killed at any moment, the one before is what restore() finds.
        step: of the training, as ps.complete_step() takes it; restore() returns it.
        keep: how many complete checkpoints are kept, this one included; None: all.
        background: False: return when it is on disk.
        timeout_s: of the wait for a disk, in seconds; None: RINGCOMM_TIMEOUT_S. After a timeout the
            save goes on.
        every_s: seconds between two checkpoints.
        every_steps: steps between two; with both whatever comes first.

    Returns:
        A future of the checkpoint's own folder, done once it is complete. If the save before is
        still under way, this waits for it first. A save that fails removes its files; those of one
        that was killed are removed by the next. None with every_s= or every_steps=.

    Raises:
        TypeError, ValueError: no folder, step, number or time can be so; nothing was begun.
        RingcommError: this is not the chief, or is within ps.snapshot().
        OSError: path cannot be written. Errors that only servers meet are raised by the future.
        CommTimeoutError: a disk, or a server, takes longer.
    """
    require_keep(keep)
    if every_s is not None or every_steps is not None:
        if step is not None or not background:
            raise ValueError(
                "ps.save: step= and background= are for a single checkpoint, every_s= and "
                "every_steps= for those that the chief saves by itself"
            )
        require_periods(every_s, every_steps)
        save_by_itself(folder_of("ps.save", path), Periodic(every_s, every_steps), keep, timeout_s)
        return None
    current = _require_chief("ps.save")
    limit_s = limit_of(current, timeout_s)
    root, step = folder_of("ps.save", path), step_of(step)
    with current.saving:  # else two threads would have the same folder
        outer = _begin(current, root, step, keep, limit_s, shows_bar=not background)
    if not background:
        outer.wait(limit_s)
    return outer


def save_by_itself(
    path: Path, periodic: Periodic, keep: int | None, timeout_s: float | None
) -> None:
    """Save between two steps from now on, on the chief."""
    current = session()
    if current.layout.role_of(current.engine.job_rank) != "worker":
        raise RingcommError("ps.save: this rank is no worker; every_s= is for all workers")

    def save_if_due() -> None:
        now = time.monotonic()
        if not periodic.is_due(now, current.clock) or not acts_as_chief() or current.snapshot:
            return
        if current.last_save is not None and not current.last_save.done():
            return  # the next step tries again
        periodic.note(now, current.clock)
        try:
            _await_pushes(current)
            saved = save(path, step=current.clock, keep=keep, timeout_s=timeout_s)
        except ServerLostError:
            raise
        except (RingcommError, OSError) as error:
            _warn(error)
        else:
            saved.then(_warn_of)

    current.between_steps = save_if_due
    save_at_stop(current, path, keep, timeout_s)


def save_at_stop(
    current: Session, path: str | Path, keep: int | None = 2, timeout_s: float | None = None
) -> None:
    """Save there, too, when the job is asked for a checkpoint, as by a signal; on a worker."""
    limit_s = limit_of(current, timeout_s)

    def save_with_all(_: int) -> None:
        _await_pushes(current)
        if acts_as_chief():
            _await_steps(current, limit_s)
            save(path, step=current.clock, keep=keep, background=False, timeout_s=timeout_s)

    current.engine.control.checkpoints[:] = [save_with_all]


def _await_steps(current: Session, limit_s: float) -> None:
    """Return once all servers have what all workers have pushed in as many steps as this one."""
    client = current.client
    ask_servers(
        client, "ps.save", FrameKind.TICK, client.servers, ignore, clock=current.clock, option=1
    ).wait(limit_s)


def _await_pushes(current: Session) -> None:
    """Return once all pushes of this worker are in: all tables are after the same step then."""
    client = current.client

    def are_in() -> bool:
        with client.lock:
            return not any(each.kind == FrameKind.PUSH for each in client.requests.values())

    client.wait_until_sent("ps.save")
    client.wait_until(are_in, "ps.save", lambda: client.servers)


def _warn_of(saved: Future[Path]) -> None:
    try:
        saved.result()
    except (RingcommError, OSError) as error:
        _warn(error)


def _warn(error: Exception) -> None:
    _log.warning(
        "ps.save: a checkpoint could not be saved, and the one before stays: %s: %s",
        type(error).__name__, error,
    )  # fmt: skip


def _begin(
    current: Session,
    root: Path,
    step: int | None,
    keep: int | None,
    limit_s: float,
    *,
    shows_bar: bool,
) -> Future[Path]:
    """Make the servers copy what is to be written, and begin to write it."""
    _finish_last(current, limit_s)
    loss = current.client.loss
    if loss is not None:
        raise loss.error("ps.save")
    folder = files.new_folder(root, _last_folder(current))
    number = new_id(current.client)
    try:
        moment = hold(current.client, number, save_to=str(root))
    except BaseException:
        release(current.client, number)
        files.discard(folder)
        raise
    release(current.client, number, is_taken=True)
    manifest = {
        "ringcomm": __version__,
        "step": step,
        "clock": current.clock,
        "time": time.time(),
        "job": moment.job,
        "rounds": moment.rounds,
        "tables": moment.tables,
    }
    try:
        outer = _write(current, number, folder, manifest, keep, shows_bar=shows_bar)
    except ServerLostError:  # nothing was asked for
        files.discard(folder)
        raise
    if current.last_save is None:
        current.engine.extensions.before_leaving(
            lambda: _finish_last(current, limit_of(current, None))
        )
    current.last_save = outer
    return outer


def restore(path: str | Path, *, timeout_s: float | None = None) -> dict[str, Any] | None:
    """Restore all tables from the newest checkpoint.

    On the chief, once all tables are open, while nobody pushes: let the others wait in rc.barrier()
    and pull afterwards, or call optimizer.pull_parameters() on every worker: until then, training
    with a ps.DistributedOptimizer is an error. The number of servers and the size of blocks may
    differ from those of the save; then a number that each block has once (its steps) is that of the
    slice with the most steps. If a file is damaged, a warning names it, and the checkpoint before
    is used. If this raises an error that ends the chief, an elastic job ends with it.

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
        RingcommError: this is not the chief; or the folder is not the same for all: the chief sees
            no checkpoint in it, and a server sees one, or the other way round.
    """
    current = _require_chief("ps.restore")
    with _refused_by_all(current, "ps.restore"):
        limit_s = limit_of(current, timeout_s)
        manifest = _restore(current, folder_of("ps.restore", path), limit_s, values_only=False)
    if manifest is not None:
        _tell_workers(current, "ps.restore")
    return manifest


def load(
    path: str | Path, *, strict: bool = True, timeout_s: float | None = None
) -> dict[str, Any]:
    """Set tables to the values of the newest checkpoint: a pre-trained start.

    As restore(), but without the updaters' state and step counts. Parameters, buffers and tables
    are found by their names, also if others than before share a table; dtypes and updaters may
    differ, shapes may not. Values of the checkpoint that are not open are left out.

    Args:
        path: as given to save().
        strict: all that is open must be in the checkpoint, with the same shape. False: what is not
            stays as it is, and a warning names it.
        timeout_s: see restore().

    Returns:
        The manifest, and three lists: "missing", names that the checkpoint has not; "mismatched",
        those whose shape is another one; and "unexpected", what it has besides.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: what is open does not fit; nothing was changed. The text names it.
    """
    current = _require_chief("ps.load")
    with _refused_by_all(current, "ps.load"):
        limit_s = limit_of(current, timeout_s)
        manifest = _restore(
            current, folder_of("ps.load", path), limit_s, values_only=True, is_strict=bool(strict)
        )
        if manifest is None:
            raise FileNotFoundError(f"ps.load: no complete checkpoint in {path}")
    _tell_workers(current, "ps.load")
    return manifest


# --- save ---------------------------------------------------------------------------------------
def _write(
    current: Session,
    number: int,
    folder: Path,
    manifest: dict[str, Any],
    keep: int | None,
    *,
    shows_bar: bool,
) -> Future[Path]:
    """Make all servers write, and a thread of this process complete the checkpoint."""
    client = current.client
    outer: Future[Path] = Future(client, "save", 1, lambda: folder)
    question = {"id": number, "folder": str(folder)}
    inner = [ask_json(client, FilesOption.SAVE, question, [server]) for server in client.servers]
    written = threading.Semaphore(0)
    for each in inner:
        each.then(lambda _: written.release())

    def complete() -> None:
        with progress_bar("ps.save", len(inner), shows=shows_bar) as bar:
            for _ in inner:  # also after an error: what others still write could not be removed
                while not written.acquire(timeout=_REDRAW_S):  # a job that dies ends this process
                    bar.advance(0)
                bar.advance(1)
        try:
            servers = [each.wait()[0] for each in inner]
            files.write_manifest(folder, {**manifest, "servers": servers})
            files.tidy(folder.parent, keep)
        except BaseException as error:  # noqa: BLE001 - raised where the future is waited for
            files.discard(folder)
            outer.fail(error)
        else:
            record_event("checkpoint", f"checkpoint of step {manifest['step']}: {folder}")
            outer.replied()
        with contextlib.suppress(RingcommError):  # an engine that is over wakes who waits by itself
            current.engine.nudge()

    threading.Thread(target=complete, name="ringcomm-ps-save", daemon=True).start()
    return outer


def _last_folder(current: Session) -> Path | None:
    """Return the last checkpoint that this rank has saved; None if there is none, or it failed."""
    try:
        return None if current.last_save is None else current.last_save.result()
    except (RingcommError, OSError):
        return None


def _finish_last(current: Session, limit_s: float) -> None:
    """Wait for a save that is under way; its own future raises its errors."""
    last = current.last_save
    if last is not None and not last.done():
        current.client.wait_for(last, limit_s)


# --- restore ------------------------------------------------------------------------------------
def _restore(
    current: Session, root: Path, limit_s: float, *, values_only: bool, is_strict: bool = True
) -> dict[str, Any] | None:
    _finish_last(current, limit_s)
    client = current.client
    number = new_id(client)
    label = "ps.load" if values_only else "ps.restore"
    job = ""

    def attempt(checkpoint: SavedCheckpoint) -> dict[str, Any]:
        common = {"id": new_id(client), "values_only": values_only, "is_strict": is_strict}
        manifest = checkpoint.manifest
        prepare = {**common, "do": PREPARE, "folder": str(checkpoint.folder)}
        try:
            with progress_bar(label, len(client.servers)) as bar:
                asked = [
                    ask_json(client, FilesOption.RESTORE, prepare, [n]) for n in client.servers
                ]
                for each in asked:
                    each.then(lambda _: bar.advance(1))
                answers = [
                    answer for [answer] in FutureOfAll(client, "restore", asked).wait(limit_s)
                ]
        except BaseException:
            ask_json(client, FilesOption.RESTORE, {**common, "do": FORGET}).wait()
            raise
        found = answers[0]
        fresh = [*found["missing"], *found.get("mismatched", ())]
        if fresh:
            some = ", ".join(fresh)
            _log.warning("%s: %s stay as they are: %s has none", label, some, checkpoint.folder)
        commit = {**common, "do": COMMIT, "is_same_job": manifest["job"] == job}
        ask_json(client, FilesOption.RESTORE, commit).wait()
        return {**manifest, **found} if values_only else manifest

    try:
        job = pause(client, number).job  # and nothing moves while servers read
        manifest = files.first_usable(root, label, attempt)
        if manifest is None:
            _require_unseen(current, root, label)
    finally:
        release(client, number)
    return manifest


def _require_unseen(current: Session, root: Path, label: str) -> None:
    """Raise RingcommError if a server sees a checkpoint where this rank sees none."""
    client, layout, name = current.client, current.layout, current.engine.transport.label
    here = name(current.engine.job_rank)
    look = {"do": LOOK, "folder": str(root)}
    for server in client.servers:
        [answer] = ask_json(client, FilesOption.RESTORE, look, [server]).wait()
        if answer["newest"]:
            raise RingcommError(
                f"{label}: {here} sees no checkpoint in {root}, and server {server}, "
                f"{name(layout.rank_of(server))}, sees {answer['newest']}: checkpoints must lie on "
                "a file system that all ranks share"
            )


@contextlib.contextmanager
def _refused_by_all(current: Session, label: str) -> Iterator[None]:
    """If the block fails, let all ranks know, for its error may end this one."""
    try:
        yield
    except PeerFailedError:
        raise
    except Exception:
        current.refuse_for_all(label)
        raise
    current.take_back_refusal()


def restore_tables(current: Session, root: Path, limit_s: float) -> dict[str, Any]:
    manifest = _restore(current, root, limit_s, values_only=False)
    if manifest is None:
        raise FileNotFoundError(f"ps.recover: no complete checkpoint in {root}")
    return manifest


def _tell_workers(current: Session, label: str) -> None:
    """Tell all workers that what they have fetched is stale.

    Those that wait in ringcomm know it once this returns: a barrier could be faster than the news.
    One that computes finds the news when it looks.
    """
    current.note_replaced()
    with contextlib.suppress(ServerLostError):  # the next call raises it
        are_told = ask_leader(current.client, label, "replaced")
        current.client.drive_until(are_told.done, label, _NEWS_S)


def limit_of(current: Session, timeout_s: float | None) -> float:
    """Return a deadline in seconds: disks may take longer than servers that compute."""
    require_timeout("checkpoint", timeout_s)
    if timeout_s is not None:
        return timeout_s
    return current.engine.settings.timeout_or_inf


def _require_chief(label: str) -> Session:
    current = session()
    if not acts_as_chief():
        raise RingcommError(
            f"{label}: worker {current.group.index} is not the chief. Call it if ps.is_chief()"
        )
    if current.snapshot:
        raise RingcommError(f"{label}: not within ps.snapshot(), which holds everything as it is")
    return current
