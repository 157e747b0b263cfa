"""Work, which collectives of c10d return, and its Future."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ringcomm.engine.core.handle import Handle
from ringcomm.torch.distributed.compat import LOSES_WORKS, c10d
from ringcomm.torch.distributed.group.callback_names import Path, follow
from ringcomm.torch.untraced import untraced

# --- callbacks of futures -------------------------------------------------------------------------
_IDLE_S = 5.0  # after which a thread without a job ends
Job = Callable[[], object]


class ElasticPool:
    """Runs each job at once, in a thread that runs no other job.

    A pool of n threads would deadlock if n jobs waited for another job. Hooks of DDP wait in
    callbacks of collectives for further collectives.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_idle = 0  # threads that wait for a job, less the jobs that wait for a thread
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()

    def submit(self, job: Job) -> None:
        """Run `job` in an idle thread or a new one; never blocks."""
        self._jobs.put(job)
        with self._lock:
            has_idle = self._n_idle > 0
            self._n_idle -= has_idle
        if not has_idle:
            threading.Thread(target=self._work, name="ringcomm-callback", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._n_idle > 0:
                        self._n_idle -= 1
                        return
                continue  # submit() counts on this thread
            job()
            del job  # and what it holds
            with self._lock:
                self._n_idle += 1


pool = ElasticPool()


_NO_TIMEOUT = timedelta(0)
_kept: set[Work] = set()  # Works that only C++ refers to, until wait() or get_future()
# DDP.join() counts ranks in each forward(), and gives that Work to C++, which waits for it in
# backward(), and does not keep its Python part: without it, the wait would never end.
_newest_counts: deque[Work] = deque(maxlen=256)


class Work(c10d.Work):  # type: ignore[misc] # see compat.c10d
    """An operation under way; without a handle, an operation that is over.

    A Work does not refer to its group: torch.compile traces all objects that it reaches from here.

    Attributes:
        path: path of the operation, with which the names of its callbacks' operations begin; None
            if ranks cannot match those by name.
        value: value of the Future: the results. For an all_gather it is one tensor whose r-th part
            is rank r's, as with NCCL: hooks of DDP expect such a tensor.
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
        """Return True once the operation is over; any thread may call this.

        Args:
            timeout: how long this call waits; 0: until the group's timeout ends the operation.

        Raises:
            CommTimeoutError: the operation is not over in time. It goes on; call wait() again.
            MismatchError, PeerFailedError, CommTimeoutError, ...: the error of the operation.
        """
        _kept.discard(self)
        if self._handle is not None:
            self._handle.wait(timeout.total_seconds() if timeout > _NO_TIMEOUT else None)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._handle is None or self._handle.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation; None if there is none so far."""
        if not self.is_completed():
            return None
        try:
            self.wait()
        except Exception as error:  # noqa: BLE001 - the caller asks for any error
            return error
        return None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Return the rank of the group that sent the message, -1 for other operations."""
        source = None if self._handle is None else self._handle.wait()
        return source if isinstance(source, int) else -1

    _source_rank = source_rank

    @untraced
    def get_future(self) -> Any:
        """Return the Future of `value`, the same at each call.

        Its callbacks may block, and wait for further collectives: they do not run in the threads
        that communicate.
        """
        with self._lock:
            if self._future is None:
                self._future = self._make_future()
            _kept.discard(self)
            return self._future

    def _make_future(self) -> Any:
        # C++ treats the error of Future.set_exception() as a value. A Future fails only if a
        # callback raises, so this is the Future of a callback's result.
        # A Future of devices runs its callbacks on streams of its own, and who waits for it makes
        # the current stream wait for these.
        devices = {x.device for x in self._results if x.is_cuda}
        ended: Any = torch.futures.Future(devices=sorted(devices, key=str))
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

    def outlives_its_caller(self) -> Work:
        """Return this Work, which stays alive for a while though only C++ may refer to it."""
        _newest_counts.append(self)
        return self


class CombinedWork(Work):
    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__(None, [], works[0].path if works else None)
        self._works = list(works)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Return True once all operations are over; `timeout` holds for each of them."""
        _kept.discard(self)
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def result(self) -> list[torch.Tensor]:
        return [each for work in self._works for each in work.result()]

    def _make_future(self) -> Any:
        futures = [work.get_future() for work in self._works]
        future = torch.futures.collect_all(futures).then(self._outcome)
        follow(future, self.path and self.path.then("together"))
        return future
