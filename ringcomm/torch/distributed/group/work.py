"""Work, which collectives of c10d return, and its Future."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ringcomm.engine.core.handle import Handle
from ringcomm.torch.distributed.compat import LOSES_WORKS, c10d, untraced
from ringcomm.torch.distributed.group.callbacks import Path, follow
from ringcomm.torch.distributed.group.pool import pool

_NO_TIMEOUT = timedelta(0)
_kept: set[Work] = set()  # what only C++ knows of, until it has asked


class Work(c10d.Work):  # type: ignore[misc] # see compat.c10d
    """An operation under way, or over (no handle).

    Holds no group: torch.compile traces whatever it reaches from here.

    Attributes:
        path: to it, for what callbacks of its Future start; None: no other rank would find it.
        value: of its Future: the results; of an all_gather, as NCCL has it and the hooks of DDP
            expect it, one tensor whose r-th part is rank r's.
    """

    def __init__(
        self, handle: Handle[Any] | None, results: Sequence[torch.Tensor], path: Path | None = None
    ) -> None:
        super().__init__()
        self._handle = handle
        self.path = path
        self._results = list(results)
        self.value = self._results
        self._future: Any = None
        self._lock = threading.Lock()
        if LOSES_WORKS:
            _kept.add(self)

    @untraced
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True once the operation is over; any thread.

        Args:
            timeout: how long this call waits; 0: as long as the group's timeout allows.

        Raises:
            CommTimeoutError: it is not over by then; it stays under way, and one can wait again.
            MismatchError, PeerFailedError, CommTimeoutError, ...: what ended it.
        """
        if self._handle is not None:
            self._handle.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        _kept.discard(self)
        return True

    def synchronize(self) -> None:
        """Return once the operation is over."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True once wait() would return or raise at once."""
        return self._handle is None or self._handle.done()

    def is_success(self) -> bool:
        """Return True once the operation is over and nothing went wrong."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return what ended the operation, None if nothing did, or it is under way."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what is asked for
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that it fills; waits for them."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Return the rank within the group that a message came from, -1 for other operations."""
        source = None if self._handle is None else self._handle.wait()
        return source if isinstance(source, int) else -1

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Any:
        """Return the Future of what it fills, the same each time; see `value`.

        Its callbacks run in threads of their own, never in one that communicates: they may block,
        and wait for further collectives.
        """
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            _kept.discard(self)
            return self._future

    def _make_future(self) -> Any:
        # Future.set_exception() stores a value: wait() in C++ returns success then. What raises is
        # a callback, so the future is the one behind it.
        ended: Any = torch.futures.Future()
        future = ended.then(self._outcome)
        follow(future, self.path)
        if self.is_completed():
            ended.set_result(None)
        else:
            assert self._handle is not None
            self._handle.when_done(lambda: pool.submit(lambda: ended.set_result(None)))
        return future

    @untraced
    def _outcome(self, _: Any) -> list[torch.Tensor]:
        self.wait()
        return self.value


class CombinedWork(Work):
    """Several operations as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__(None, [], works[0].path if works else None)
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True once all are over; `timeout` is for each."""
        for work in self._works:
            work.wait(timeout)
        _kept.discard(self)
        return True

    def is_completed(self) -> bool:
        """Return True once all are over."""
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        """Return what they fill, one after another."""
        return [each for work in self._works for each in work.result()]

    def _make_future(self) -> Any:
        futures = [work.get_future() for work in self._works]
        future = torch.futures.collect_all(futures).then(self._outcome)
        follow(future, self.path and self.path.then("together"))
        return future
