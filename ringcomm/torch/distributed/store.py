"""A c10d Store whose messages are MPI's: for clusters that let no sockets through.

Rank 0 keeps the values, and a thread of its own answers the others' questions.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ringcomm.engine.api.collectives import barrier
from ringcomm.errors import CommTimeoutError
from ringcomm.torch.distributed.compat import c10d
from ringcomm.transport.mailbox import Mailbox

_POLL_S = 2e-3  # between questions for a key that is not there yet

_LEAST_S = 10.0  # for rank 0 to answer, however short the timeout of keys is


class MpiStore(c10d.Store):  # type: ignore[misc] # see compat.c10d
    """A store that all ranks of the job share. Collective to make, after init()."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        barrier()  # MPI would wait for a rank that never comes here without an end, and in C
        self._mailbox = Mailbox()
        self._lock = threading.Lock()  # one question of this rank at a time
        self._values: Any = c10d.HashStore()  # of rank 0
        self._values_lock = threading.Lock()
        if self._mailbox.rank == 0:
            self._mailbox.serve(self._answer)

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value."""
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        """Return a value, once it is there.

        Raises:
            CommTimeoutError: it is not, within the timeout.
        """
        self.wait([key])
        return bytes(self._ask("get", key))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return the sum."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Set a value if it is as expected, or if there is none and none is; return it."""
        return bytes(self._ask("compare_set", key, _bytes(expected), _bytes(desired)))

    def append(self, key: str, value: bytes | str) -> None:
        """Set a value behind what is there."""
        self._ask("append", key, _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return several values."""
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set several values."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Return True: append(), multi_get() and multi_set() are there."""
        return True

    def check(self, keys: Sequence[str]) -> bool:
        """Return True if all are there."""
        return bool(self._ask("check", list(keys)))

    def delete_key(self, key: str) -> bool:
        """Remove a value; return True if there was one."""
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        """Return how many values there are."""
        return int(self._ask("num_keys"))

    deleteKey, getNumKeys = delete_key, num_keys  # C++ looks for these names

    def clone(self) -> MpiStore:
        """Return this one, which any thread may use: gloo asks for one of its own."""
        return self

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long get() and wait() wait."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """Longest wait of get() and wait()."""
        return self._timeout

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return once all are there.

        Raises:
            CommTimeoutError: they are not, within the timeout.
        """
        limit_s = (self._timeout if timeout is None else timeout).total_seconds()
        deadline = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() >= deadline:
                raise CommTimeoutError(
                    f"mpi-nosock://: rank {self._mailbox.rank} has waited for "
                    f"{', '.join(map(str, keys))}; the timeout of {limit_s:g} s is over. Let every "
                    "rank come to the same call"
                )
            time.sleep(_POLL_S)

    def _ask(self, *request: Any) -> Any:
        """Return what rank 0's store returns for (its method, arguments)."""
        if self._mailbox.rank == 0:
            return self._carry_out(request)
        with self._lock:
            limit_s = max(self._timeout.total_seconds(), _LEAST_S)
            return pickle.loads(self._mailbox.ask(pickle.dumps(request), limit_s))

    # --- on rank 0 --------------------------------------------------------------------------------
    def _answer(self, request: bytes) -> bytes:
        return pickle.dumps(self._carry_out(pickle.loads(request)))

    def _carry_out(self, request: tuple[Any, ...]) -> Any:
        method, *arguments = request
        with self._values_lock:
            if method == "get" and not self._values.check(arguments):  # it would wait for the key
                return b""
            return getattr(self._values, method)(*arguments)


def _bytes(value: bytes | str) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
