"""What the fake servers and clients of ps_simulation.py say to each other."""

from typing import Any, NamedTuple

from ringcomm.ps.protocol.frames import FrameHeader, Status
from ringcomm.ps.server.core.actions import Key
from ringcomm.ps.update_modes import Mode

FIRST_SERVER = 100  # rank of server 0


class Shape(NamedTuple):
    """A table of a run."""

    mode: Mode
    is_dense: bool
    n_partitions: int = 3
    is_held: bool = False  # the mean of each round waits for a release
    is_late: bool = False  # it is opened while others train
    is_of_chief: bool = False  # its values come from the chief


class Request(NamedTuple):
    source: int
    header: FrameHeader
    flag: str = ""  # of a push: initial, assign, hold, release
    body: Any = None  # of a push: the name of its update, by partition
    content: Any = None


class Reply(NamedTuple):
    to: Request
    status: Status
    clock: int = 0
    content: Any = None
    owners: Any = None  # epoch and owners
    body: Any = None


class RankOrder(NamedTuple):
    """An order of the server that leads; see ringcomm.ps.control.agreement."""

    number: int
    do: str
    content: Any


class Notice(NamedTuple):
    key: Key
    epoch: int
    owners: list[int]
