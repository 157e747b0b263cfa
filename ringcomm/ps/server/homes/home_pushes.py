"""The pushes that C++ carries out on both copies of a home, as Python sees them.

See csrc/ps/home_pushes.hpp, and ringcomm.ps.server.homes.replication for the protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ringcomm.ps.server.homes.replication import Numbers

if TYPE_CHECKING:
    from ringcomm import _core
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.placement.partitions import Partition
    from ringcomm.ps.server.dense.partition import DensePartition


class HomePushes(Numbers, Protocol):
    """Numbers all changes of a home, and carries out those pushes that need no Python."""

    @property
    def carried_out(self) -> tuple[int, int]:
        """How many pushes it has carried out, and the bytes of their bodies."""

    def lead(self, follower: int | None) -> None:
        """Take pushes as the primary, which has a follower, or none."""

    def follow(self, primary: int) -> None:
        """Carry out what the primary sends."""

    def wait_for_python(self, *, is_kept: bool) -> None:
        """Leave all pushes to Python, or not: for it keeps changes or reads, or copies the home."""

    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None:
        """Take pushes for a block of the home."""

    def complete(self, number: int) -> None:
        """Carry out pushes at the primary: the follower has done all changes up to a number."""

    def repeat(self, meta: bytes, body: Bytes) -> None:
        """Carry out the push of a record at the follower."""

    def drop(self) -> None:
        """Take nothing more: there is no copy of the home here any more."""


def make_pushes(endpoint: _core.PipeEndpoint | None, home: int) -> HomePushes:
    return NoPushes() if endpoint is None else PipedPushes(endpoint, home)


class PipedPushes:
    """HomePushes that come through the pipes of a node. See HomePushes for each method."""

    def __init__(self, endpoint: _core.PipeEndpoint, home: int) -> None:
        self._endpoint, self._home = endpoint, home
        self._pushes = endpoint.begin_home(home)

    @property
    def last(self) -> int:
        return self._pushes.last

    @property
    def n_under_way(self) -> int:
        return self._pushes.n_under_way

    @property
    def carried_out(self) -> tuple[int, int]:
        return self._pushes.n_requests, self._pushes.n_body

    def next(self) -> int:
        return self._pushes.next()

    def lead(self, follower: int | None) -> None:
        self._pushes.lead(follower)

    def follow(self, primary: int) -> None:
        self._pushes.follow(primary)

    def wait_for_python(self, *, is_kept: bool) -> None:
        self._pushes.is_kept = is_kept

    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None:
        self._endpoint.open(*partition, epoch, part.block_updater, self._pushes)

    def complete(self, number: int) -> None:
        self._endpoint.complete(self._pushes, number)

    def repeat(self, meta: bytes, body: Bytes) -> None:
        self._endpoint.follow(self._pushes, meta, body)

    def drop(self) -> None:
        self._endpoint.drop_home(self._home)


class NoPushes:
    """HomePushes of a rank that has no pipes: Python carries out all changes."""

    n_under_way, carried_out = 0, (0, 0)

    def __init__(self) -> None:
        self.last = 0

    def next(self) -> int:
        self.last += 1
        return self.last

    def lead(self, follower: int | None) -> None: ...

    def follow(self, primary: int) -> None: ...

    def wait_for_python(self, *, is_kept: bool) -> None: ...

    def open(self, partition: Partition, epoch: int, part: DensePartition) -> None: ...

    def complete(self, number: int) -> None: ...

    def repeat(self, meta: bytes, body: Bytes) -> None:
        raise AssertionError(f"a push of {body.nbytes} bytes has come for C++, which has no pipes")

    def drop(self) -> None: ...
