"""log(): values of this rank, such as its loss, for `ringcomm top`, a file and trackers."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import json
import logging
import operator
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import ConfigError
from ringcomm.launched.child_marks import create_run_file, run_file
from ringcomm.status.json_numbers import json_number
from ringcomm.status.run_events import write_event

_log: Final = logging.getLogger("ringcomm")
_NO_STEP: Final = -1
_MOST_STEPS: Final = (1 << 63) - 1
_FLUSH_S: Final = 5
_LACKS: Final = "%s, which rc.log_to() was given, lacks what rc.log() gets: %s. Training goes on"
_OF_THE_LINE: Final = ("time", "step", "of")  # what each line of a rank's file has itself
_Tracker = Callable[[dict[str, float], int | None], object]
_trackers: list[_Tracker] = []
_tensorboards: dict[str, _Tracker] = {}  # by folder


def log(
    values: Mapping[str, Any] | None = None,
    /,
    *,
    step: int | None = None,
    of: int | None = None,
    **scalars: Any,
) -> None:
    """Record values of this rank: rc.log(step=7, loss=0.5). Not collective.

    `ringcomm top` shows the latest values of the first 4 names, and `ringcomm top --json` those of
    the first 32 names, per rank. In a job of `ringcomm run`, each call adds a line to metrics.jsonl
    in the run's folder, or to metrics-<rank>.jsonl on other ranks than 0. If that file cannot be
    written, this is one warning, and no error. On rank 0, trackers get the values, too; see
    log_to(). With RINGCOMM_TENSORBOARD=folder, TensorBoard is one of them; tensorboard or
    tensorboardX writes it. If it cannot, this is one warning, too.

    Args:
        values: further values by name, for names such as "train/loss". A whole number called "step"
            is the step, if that is not passed.
        step: the training step to which the values belong. Without one, TensorBoard has them at the
            step after the last one that it was given.
        of: how many steps there will be: the dashboard shows how long the rest will take.
        **scalars: the values, which float() must accept, such as numbers and tensors of one
            element. A value on a GPU is waited for.

    Raises:
        TypeError: a value is no number, a name no text, or step or of no whole number.
        ValueError: step or of is less than 0, or 2**63 or more.
        ConfigError: RINGCOMM_TENSORBOARD is set, and neither package is there.
        NotInitializedError: init() has not run.
    """
    this = engine()
    whole = None if step is None else _step("step", step)
    of_steps = None if of is None else _step("of", of)
    given = {**(values or {}), **scalars}
    found = {_checked(name): _number(name, value) for name, value in given.items()}
    if whole is None and _is_step(found.get("step", _NO_STEP)):
        whole = int(found.pop("step"))
    for name, number in found.items():
        if this.page is not None:
            this.page.log_scalar(name, _NO_STEP if whole is None else whole, number)
    _write_line(this.job_rank, whole, of_steps, found)
    if this.job_rank != 0:
        return
    if folder := this.settings.tensorboard:
        _tell_tensorboard(folder, found, whole)
    for track in _trackers:
        track(found, whole)


def log_to(tracker: Any) -> None:
    """Pass what rank 0 logs from now on to a tracker, too.

    Args:
        tracker: an object with add_scalar(name, value, step), such as the SummaryWriter of
            tensorboardX or torch; with log_metric(name, value, step=), such as the module mlflow;
            or with log(values, step=), such as a run of wandb. Other ranks may pass it, too.

    An OSError of the tracker, as on a full disk, is one warning, and log() goes on.

    Raises TypeError if it has none of these.
    """
    track = _tracking(tracker)
    _do_not_wait_for_an_ended_thread(tracker)
    has_failed = False

    def track_or_warn(values: dict[str, float], step: int | None) -> None:
        nonlocal has_failed
        try:
            track(values, step)
        except OSError as error:
            if not has_failed:
                _log.warning(_LACKS, type(tracker).__name__, error.strerror or error)
            has_failed = True

    _trackers.append(track_or_warn)


def _do_not_wait_for_an_ended_thread(tracker: Any) -> None:
    """Empty the queue of tensorboardX's SummaryWriter once its thread has ended.

    The thread ends on a full disk, and says nothing; add_scalar() and close() would then wait for
    ever for room in the queue of 10 events.
    """
    writer = getattr(getattr(tracker, "file_writer", None), "event_writer", None)
    worker, queue = getattr(writer, "_worker", None), getattr(writer, "_event_queue", None)
    if not isinstance(worker, threading.Thread) or queue is None:
        return

    def watch() -> None:
        worker.join()
        if getattr(writer, "_closed", True):
            return
        _log.warning(_LACKS, type(tracker).__name__, "its thread has ended, as on a full disk")
        with contextlib.suppress(OSError, ValueError, EOFError):  # it has been closed
            while True:
                queue.get()

    threading.Thread(target=watch, name="ringcomm-tracker", daemon=True).start()


def note_event(text: str) -> None:
    """Record what happened on this rank, in a few words, for watchers. Not collective.

    `ringcomm top` shows it. In a job of `ringcomm run`, it is also a line of events-<rank>.jsonl in
    the run's folder, which the dashboard shows.
    """
    page = engine().page
    if not isinstance(text, str):
        raise TypeError(f"note_event: text must be a str, not {text!r}")
    if page is not None:
        page.note_event(text.encode(errors="replace").decode())  # lone surrogates
        write_event("note", text)


def _tell_tensorboard(folder: str, values: dict[str, float], step: int | None) -> None:
    """Pass values to TensorBoard, until its folder cannot be written: that is said once."""
    try:
        if folder not in _tensorboards:
            _tensorboards[folder] = _tracking(_tensorboard(folder))
        _tensorboards[folder](values, step)
    except OSError as error:
        _log.warning(
            "RINGCOMM_TENSORBOARD=%s cannot be written: %s. TensorBoard gets no more of what "
            "rc.log() gets.",
            folder,
            error.strerror or error,
        )
        _tensorboards[folder] = lambda *_: None


def _tensorboard(folder: str) -> Any:
    """Return a writer of tensorboardX, or else of tensorboard."""
    try:
        return _Flushing(_TensorBoardX(folder))
    except ModuleNotFoundError:
        pass
    except ImportError:  # a version with other parts
        from tensorboardX import SummaryWriter

        return SummaryWriter(folder, flush_secs=_FLUSH_S)
    try:
        from tensorboard.summary import Writer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"RINGCOMM_TENSORBOARD is {folder!r}, and neither tensorboard nor tensorboardX is "
            "there: pip install tensorboardX"
        ) from error
    return _Flushing(Writer(folder))


class _TensorBoardX:
    """Writes a file of tensorboardX in the thread that calls.

    The thread of its SummaryWriter ends on a full disk: then its queue is soon full, and who adds
    a value waits for ever.
    """

    def __init__(self, folder: str) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.record_writer import directory_check
        from tensorboardX.summary import scalar

        directory_check(folder)
        self._file = EventsWriter(os.path.join(folder, "events"))
        self._event, self._scalar = Event, scalar
        self.flush = self._file.flush

    def add_scalar(self, name: str, value: float, step: int) -> None:
        summary = self._scalar(name, value)
        self._file.write_event(self._event(wall_time=time.time(), step=step, summary=summary))


class _Flushing:
    """Flushes a writer every 5 s, and when Python ends: tensorboard's is not flushed then."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        self._next = time.monotonic()
        atexit.register(self._flush_last)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self._writer.add_scalar(name, value, step)
        if time.monotonic() >= self._next:
            self._writer.flush()
            self._next = time.monotonic() + _FLUSH_S

    def _flush_last(self) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            self._writer.flush()


class _Scalars:
    def __init__(self, add: Callable[[str, float, int], object]) -> None:
        self._add, self._next = add, 0

    def __call__(self, values: dict[str, float], step: int | None) -> None:
        at = self._next if step is None else step
        self._next = min(at + 1, _MOST_STEPS)
        for name, value in values.items():
            self._add(name, value, at)


def _tracking(tracker: Any) -> _Tracker:
    if callable(add := getattr(tracker, "add_scalar", None)):
        return _Scalars(add)
    if callable(log_metric := getattr(tracker, "log_metric", None)):
        return lambda values, step: [
            log_metric(name, value, step=step) for name, value in values.items()
        ]
    if callable(log_all := getattr(tracker, "log", None)):
        return lambda values, step: log_all(values, step=step)
    raise TypeError(
        f"log_to: {type(tracker).__name__} has none of add_scalar(), log_metric() and log()"
    )


def _step(name: str, step: int) -> int:
    whole = operator.index(step)
    if not 0 <= whole <= _MOST_STEPS:
        raise ValueError(f"log: {name} is {whole}; it must be at least 0 and less than 2**63")
    return whole


def _is_step(value: float) -> bool:
    return 0 <= value <= _MOST_STEPS and value.is_integer()


@functools.lru_cache(maxsize=256)
def _checked(name: Any) -> str:
    if not isinstance(name, str):
        raise TypeError(f"log: the name {name!r} must be a str")
    return name.encode(errors="replace").decode()  # lone surrogates


def _number(name: str, value: Any) -> float:
    detach = getattr(value, "detach", None)  # float() of a tensor that requires gradients warns
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"log: {name} is {value!r}, which is no number") from error


class _File:
    """A rank's file in the folder of its run, which stays open.

    If it cannot be written, that is said once: no training ends for its records.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._has_half_a_line = False
        self._has_failed = False

    def append(self, line: str) -> None:
        """Append a line. One call, so that a killed rank leaves no half."""
        text = f"\n{line}\n" if self._has_half_a_line else f"{line}\n"
        data = text.encode()
        try:
            if self._descriptor is None:
                self._descriptor = create_run_file(self._path, os.O_APPEND)
            written = os.write(self._descriptor, data)
            self._has_half_a_line = written < len(data)
            if self._has_half_a_line:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if not self._has_failed:
                _log.warning(
                    "%s cannot be written: %s. It lacks what rc.log() gets until it can be; "
                    "`ringcomm top` shows that.",
                    self._path,
                    error.strerror,
                )
            self._has_failed = True


def _write_line(rank: int, step: int | None, of: int | None, values: Mapping[str, float]) -> None:
    file = _file(os.getpid(), rank)
    if file is None:
        return
    # Without json's encoder, which takes three times as long in a step that has used the caches.
    line = f'{{"time": {time.time():.6f}'
    if step is not None:
        line += f', "step": {step}'
    if of is not None:
        line += f', "of": {of}'
    for name, number in _named_apart(values).items():
        value = json_number(number)
        line += f", {_quoted(name)}: {_quoted(value) if isinstance(value, str) else repr(value)}"
    file.append(f"{line}}}")


def _named_apart(values: Mapping[str, float]) -> Mapping[str, float]:
    """Return the values with "time_" for "time": no training ends for the name of a value."""
    names = {}
    for name in _OF_THE_LINE:
        if name in values:
            names[name] = f"{name}_"
            while names[name] in values:
                names[name] += "_"
    return {names.get(name, name): v for name, v in values.items()} if names else values


@functools.cache
def _file(pid: int, rank: int) -> _File | None:
    """Return the file of a rank; None if there is no run.

    A child process (`pid`) opens its own; a spare gets the rank of the one whose place it takes.
    """
    del pid
    path = run_file("metrics.jsonl" if rank == 0 else f"metrics-{rank}.jsonl")
    return _File(path) if path else None


@functools.lru_cache(maxsize=256)
def _quoted(name: str) -> str:
    return json.dumps(name)
