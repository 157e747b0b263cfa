"""The commands that ranks agree on; each is a script of the server that leads. Pure.

| command | who asks | what follows |
|---|---|---|
| Stop | the chief | all workers end after the same number of calls of should_stop(), or soon |
| Replaced | the chief | all workers know that the values of tables were replaced |
| Refuse | a rank that could not restore a checkpoint, or open a table | if it ends, all end |
| Refuse, goes_on | the same rank, which has caught that error | the others survive its end again |
| Open | each rank that uses a table | all servers have the table; or none, if one cannot make it |
| MakeAll | all who live, in ps.recover() | all servers have all tables, under new numbers |
| Close | each rank that uses a table | the table is gone on all servers |
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from ringcomm.ps.control.agreement import (
    Answers,
    Command,
    Do,
    Member,
    Order,
    RefusedError,
    Script,
    Until,
)
from ringcomm.ps.placement.replacement_workers import Newcomer
from ringcomm.ps.protocol.frames import RECOVERING
from ringcomm.ps.server.core.actions import CoreRequest, Discard
from ringcomm.ps.server.core.core_table import ServedTable

# What ranks do, see ringcomm.ps.session.
COUNT: Final = "count"
END: Final = "end"
REPLACED: Final = "replaced"
REFUSE: Final = "refuse"
GO_ON: Final = "go on"
# What servers do.
MAKE: Final = "make"
MAKE_ALL: Final = "make all"
DROP: Final = "drop"

# For what a rank waits, see ringcomm.ps.client.waits.
CLOSING: Final = "closing"
STOPPING: Final = "ps.stop()"
_Awaited = tuple[str, str, list[int]]


class Job(Protocol):
    """The job as the server that leads knows it."""

    @property
    def workers(self) -> Collection[int]:
        """Those that have not left, nor died."""

    @property
    def live_workers(self) -> Collection[int]:
        """Those of them that may complete more steps."""

    @property
    def evaluators(self) -> Collection[int]: ...
    @property
    def standing_by(self) -> Collection[int]:
        """Ranks that may take the place of a worker or an evaluator."""

    @property
    def ranks(self) -> Collection[int]: ...
    @property
    def server_numbers(self) -> tuple[int, ...]: ...
    @property
    def other_servers(self) -> Collection[int]: ...
    @property
    def left(self) -> Collection[int]: ...
    @property
    def tables(self) -> Mapping[int, ServedTable]: ...
    @property
    def taken(self) -> Mapping[int, Newcomer]:
        """Who has the place of a rank that died, by rank."""

    @property
    def is_quiet(self) -> bool:
        """True if nothing moves, and nobody has a pause."""


def _told(ranks: Collection[int], content: Any = None) -> dict[Member, Any]:
    return {Member(rank): content for rank in sorted(ranks)}


@dataclass(frozen=True)
class Stop:
    """Training ends; by_count: after equally many calls of should_stop() on all workers.

    Where workers must push in each round, one that ended a step earlier would leave the others
    waiting. So the next call after the largest number is the last one on each of them; a call in
    between waits.
    """

    by_count: bool

    is_about_tables: ClassVar[bool] = True  # ps.recover() forgets it

    @property
    def key(self) -> Hashable:
        return "stop"

    def script(self, job: Job, requests: list[CoreRequest]) -> Script:
        del requests
        counts: dict[Member, int] = {}
        while self.by_count and (new := {*_told(job.live_workers)} - counts.keys()):
            answers = yield Order(dict.fromkeys(sorted(new)), COUNT)
            counts |= {member: answers.get(member, 0) for member in new}  # 0: it is gone
        last = max(counts.values(), default=0) + 1 if self.by_count else 0
        workers = {*job.live_workers, *job.standing_by}
        yield Order({**_told(workers, last), **_told(job.evaluators, 0)}, END)

    def awaited(self, job: Job) -> _Awaited:
        del job
        return STOPPING, "", []


@dataclass(frozen=True)
class Replaced:
    """The values of tables were replaced: what workers fetched before is stale.

    Args:
        number: of the request: each is for itself.
    """

    number: int

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "replaced", self.number

    def script(self, job: Job, requests: list[CoreRequest]) -> Script:
        yield Order(_told({*job.workers} - {requests[0].source}), REPLACED)

    def awaited(self, job: Job) -> _Awaited:
        del job
        return "ps.restore()", "", []


@dataclass(frozen=True)
class Refuse:
    """A rank could not restore a checkpoint, or open a table: if it ends now, the job ends.

    Its end would be taken for a death: the others would train from the first values, or with
    another table, and their saves would remove the checkpoints.

    Args:
        rank: see above.
        goes_on: its program has caught the error, and trains.
    """

    rank: int
    goes_on: bool = False

    is_about_tables: ClassVar[bool] = False

    @property
    def key(self) -> Hashable:
        return "go on" if self.goes_on else "refuse", self.rank

    def script(self, job: Job, requests: list[CoreRequest]) -> Script:
        del requests
        do = GO_ON if self.goes_on else REFUSE
        yield Order(_told({*job.ranks} - {self.rank}, self.rank), do)

    def awaited(self, job: Job) -> _Awaited:
        del job
        return "an error", "", []


def _servers(job: Job, content: Any) -> dict[Member, Any]:
    return dict.fromkeys((Member(number, True) for number in job.other_servers), content)


def _problems(answers: Answers) -> str:
    return "; ".join(f"server {each.number}: {why}" for each, why in answers.items() if why)


@dataclass(frozen=True)
class Open:
    """A rank opens a table; the leader has made its own part, if it is new."""

    number: int

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "open", self.number

    def script(self, job: Job, requests: list[CoreRequest]) -> Script:
        del requests
        table = job.tables[self.number]
        if not table.is_open:
            answers = yield Order(_servers(job, [table.described()]), MAKE)
            if problems := _problems(answers):
                yield Do([Discard(self.number)])
                yield Order(_servers(job, self.number), DROP)
                raise RefusedError(f"table[{table.name}]: cannot be made: {problems}")
            table.is_open = True
        return table.described()

    def awaited(self, job: Job) -> _Awaited:
        table = job.tables.get(self.number)
        return "opening", "" if table is None else table.name, []


@dataclass(frozen=True)
class MakeAll:
    """All begin anew after the loss of a server; the leader has made its own part of all tables."""

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "make all"

    def script(self, job: Job, requests: list[CoreRequest]) -> Script:
        del requests
        tables = [table.described() for table in job.tables.values() if table.is_open]
        answers = yield Order(_servers(job, [dict(job.taken), tables]), MAKE_ALL)
        if problems := _problems(answers):
            raise RefusedError(f"ps.recover: tables cannot be made anew: {problems}")
        tables = [table.described() for table in job.tables.values() if table.is_open]
        return {"servers": job.server_numbers, "tables": tables}

    def awaited(self, job: Job) -> _Awaited:
        del job
        return RECOVERING, "", []


@dataclass(frozen=True)
class Close:
    """A table goes once all who have opened it have closed it, or left.

    Not within a pause: a snapshot, or a checkpoint, says which tables there are.
    """

    table: int

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "close", self.table

    def script(self, job: Job, requests: list[CoreRequest]) -> Script:
        if self.table not in job.tables:
            raise RefusedError(f"there is no table {self.table}")
        table = job.tables[self.table]

        def is_unused() -> bool:
            table.openers -= {each.source for each in requests}
            return all(rank in job.left for rank in table.openers)

        yield Until(lambda: is_unused() and job.is_quiet)
        yield Do([Discard(self.table)])
        yield Order(_servers(job, self.table), DROP)

    def awaited(self, job: Job) -> _Awaited:
        table = job.tables.get(self.table)
        if table is None:  # other servers are about to drop it
            return CLOSING, "", []
        return CLOSING, table.name, sorted({*table.openers} & {*job.live_workers})


def command_of(content: Mapping[str, Any], request: CoreRequest) -> Command:
    """Return the command that a request asks for. Raises ValueError: there is none."""
    name = content["command"]
    if name == "stop":
        return Stop(content["by_count"])
    if name == "replaced":
        return Replaced(request.header.sequence)
    if name == "refuse":
        return Refuse(request.source)
    if name == "go on":
        return Refuse(request.source, goes_on=True)
    if name == "close":
        return Close(content["table"])
    raise ValueError(f"there is no command {name!r}")
