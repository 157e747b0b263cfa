"""Computes results ahead, in a thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
_END = object()
_END_S = 5.0  # seconds to wait for a load() that is under way when the generator is closed


class LateError(Exception):
    pass


def prefetched(
    load: Callable[[T], R], items: Iterable[T], *, ahead: int, timeout_s: float | None
) -> Generator[R, None, None]:
    """Yield load(item) for each item, in order; a thread keeps up to `ahead` results ready.

    Raises an error of `items` or load() in place of the result, and LateError if a result takes
    longer than timeout_s. Closing the generator ends the thread.
    """
    room = threading.Semaphore(ahead)
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    is_closed = threading.Event()

    def work() -> None:
        try:
            for item in items:
                room.acquire()
                if is_closed.is_set():
                    return
                results.put((load(item), None))
            results.put((_END, None))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            results.put((None, error))

    thread = threading.Thread(target=work, name="ringcomm-loader", daemon=True)
    thread.start()
    try:
        while True:
            try:
                result, error = results.get(timeout=timeout_s)
            except queue.Empty:
                raise LateError from None
            if error is not None:
                raise error
            if result is _END:
                return
            room.release()
            yield result
    finally:
        is_closed.set()
        room.release()
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting
            thread.join(_END_S)
