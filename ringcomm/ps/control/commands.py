"""The commands that ranks agree on; each is a script of the server that leads. Pure.

| command | who asks | what follows |
|---|---|---|
| Stop | the chief | all workers end after the same number of calls of should_stop(), or soon |
| Replaced | the chief | all workers know that the values of tables were replaced |
| Refuse | a rank that could not restore a checkpoint, or open a table | if it ends, all end |
| Refuse, goes_on | the same rank, which has caught that error | the others survive its end again |
| Open | each rank that uses a table | all servers have the table; or none, if one cannot make it |
| Recover | all workers, after a loss | all servers begin anew, with tables under new numbers |
| GoOn | all workers, after that | all know that one of them has restored a checkpoint |
| Follow | an evaluator, or a rank that stands by | it goes on with the workers |
| Close | each rank that uses a table | the table is gone on all servers |
| Pause | a rank that saves, restores, or leaves | nothing moves, until it ends that, or is gone |
| Snapshot | a rank that saves, or evaluates | likewise; and servers hold the values of one moment |
| End | the same rank | its pause, or snapshot, is over |
| Migrate | a rank; or the leader itself | partitions get new owners, see core.migration |
| StandBy | a rank that waits for the place of one that died | it has one, and all know it |
| Here | the chief, which stands still between two steps | a newcomer begins there |
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, Protocol

from ringcomm.ps.control.agreement import (
    Answers,
    Asked,
    Command,
    Do,
    Member,
    Order,
    RefusedError,
    Script,
    Told,
    Until,
)
from ringcomm.ps.control.move_lock import MoveLock
from ringcomm.ps.moment_numbers import owner_of
from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.placement.replacement_workers import Beginning, Coming, Newcomer, Newcomers
from ringcomm.ps.protocol.frames import RECOVERING
from ringcomm.ps.server.core.actions import CoreRequest, Discard, Notify, Reopen
from ringcomm.ps.server.core.core_table import ServedTable

# What ranks do, see ringcomm.ps.session.
COUNT: Final = "count"
END: Final = "end"
REPLACED: Final = "replaced"
REFUSE: Final = "refuse"
GO_ON: Final = "go on"
STAND_STILL: Final = "stand still"
BEGIN: Final = "begin"
MEET: Final = "meet"
# What servers do.
MAKE: Final = "make"
MAKE_ALL: Final = "make all"
DROP: Final = "drop"
STOP: Final = "stop rounds"
HOLD: Final = "hold"
LET: Final = "let go"
FREEZE: Final = "freeze"
DRAIN: Final = "drain"
GIVE: Final = "give"
COMMIT: Final = "commit"
THAW: Final = "thaw"
HOW_FAR: Final = "how far"
TAKE: Final = "take"
WITHOUT: Final = "without"
TAKE_PLACE: Final = "take a place"
RETRACT: Final = "retract"

AT_ONCE: Final = (
    64  # partitions of a hash table in one migration: it stands still until they are there
)
_TRIES: Final = 10  # of a snapshot: rounds of a new table are over before all servers know it

# For what a rank waits, see ringcomm.ps.client.waits.
CLOSING: Final = "closing"
STOPPING: Final = "ps.stop()"
MOVING: Final = "a move"
JOINING: Final = "a rank that takes a place"
_Awaited = tuple[str, str, list[int]]


class Recovered(NamedTuple):
    """The last recovery: with these servers, and what the worker said that has restored."""

    servers: tuple[int, ...]
    said: Mapping[str, Any]


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
    def newcomers(self) -> Newcomers: ...
    def next_newcomer(self) -> Newcomer | None:
        """Return who gets the next place, if one is free and somebody waits for it."""

    @property
    def following(self) -> Collection[int]:
        """Ranks that have asked for Follow."""

    @property
    def name(self) -> str:
        """Of this job alone."""

    @property
    def move_lock(self) -> MoveLock: ...
    def clients(self) -> list[int]: ...

    recovered: Recovered | None


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

    def script(self, job: Job, asked: list[Asked]) -> Script:
        del asked
        counts: dict[Member, int] = {}
        while self.by_count and (new := {*_told(job.live_workers)} - counts.keys()):
            answers = yield Order(dict.fromkeys(sorted(new)), COUNT)
            counts |= {member: answers.get(member, 0) for member in new}  # 0: it is gone
        last = max(counts.values(), default=0) + 1 if self.by_count else 0
        workers = {*job.live_workers, *job.standing_by}
        yield Order({**_told(workers, last), **_told(job.evaluators, 0)}, END)

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del job, asked
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

    def script(self, job: Job, asked: list[Asked]) -> Script:
        yield Order(_told({*job.workers} - {asked[0].request.source}), REPLACED)

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del job, asked
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

    def script(self, job: Job, asked: list[Asked]) -> Script:
        del asked
        do = GO_ON if self.goes_on else REFUSE
        yield Order(_told({*job.ranks} - {self.rank}, self.rank), do)

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del job, asked
        return "an error", "", []


def _told_servers(servers: Iterable[int], content: Any) -> dict[Member, Any]:
    return dict.fromkeys((Member(number, True) for number in sorted(servers)), content)


def _servers(job: Job, content: Any) -> dict[Member, Any]:
    return _told_servers(job.other_servers, content)


def _all_servers(job: Job, content: Any) -> dict[Member, Any]:
    return _told_servers(job.server_numbers, content)


def failed(error: Exception) -> dict[str, str]:
    """Return the answer to an order that could not be carried out."""
    return {"failed": f"{type(error).__name__}: {error}"[:2000]}


def _problems(answers: Answers) -> str:
    found = {
        each.number: answer["failed"]
        for each, answer in answers.items()
        if isinstance(answer, dict) and "failed" in answer
    }
    return "; ".join(f"server {number}: {why}" for number, why in found.items())


@dataclass(frozen=True)
class Open:
    """A rank opens a table; the leader has made its own part, if it is new."""

    number: int

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "open", self.number

    def script(self, job: Job, asked: list[Asked]) -> Script:
        del asked
        table = job.tables[self.number]
        if not table.is_open:
            answers = yield Order(_servers(job, [table.described()]), MAKE)
            if problems := _problems(answers):
                yield Do([Discard(self.number)])
                yield Order(_servers(job, self.number), DROP)
                raise RefusedError(f"table[{table.name}]: cannot be made: {problems}")
            table.is_open = True
        return table.described()

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del asked
        table = job.tables.get(self.number)
        return "opening", "" if table is None else table.name, []


def _latest(asked: list[Asked]) -> dict[int, Any]:
    """Return what each rank has asked for; a request that comes again replaces the one before."""
    return {each.request.source: each.command for each in asked}


def _missing(job: Job, asked: list[Asked]) -> set[int]:
    """Return the workers for which others wait that go back to a checkpoint.

    One counts only if it knows the same servers as the leader. Else one of both is about to hear of
    a death; and the rank asks again once it does.
    """
    return {*job.workers} - {*job.following} - {*_knowing(job, asked)}


def _knowing(job: Job, asked: list[Asked]) -> list[int]:
    return [n for n, each in _latest(asked).items() if each.servers == job.server_numbers]


@dataclass(frozen=True)
class Recover:
    """All workers go back to a checkpoint, once all have come: servers begin anew, without tables.

    Attributes:
        servers: that live, as far as the rank knows that asks.
        tables: that it uses: name -> old number, and the spec; see Catalog.reopen().
        has_checkpoint: it has found one; that of the lowest rank counts.
    """

    servers: tuple[int, ...]
    tables: Mapping[str, Any] = field(hash=False)
    has_checkpoint: bool

    key: ClassVar[Hashable] = "recover"
    is_about_tables: ClassVar[bool] = False

    def script(self, job: Job, asked: list[Asked]) -> Script:
        yield Until(lambda: not _missing(job, asked))
        came = _latest(asked)
        job.recovered = None
        if not came:  # nobody is left
            return None
        if not came[min(came)].has_checkpoint:
            return {"tables": None}
        why = yield Do([Reopen({rank: each.tables for rank, each in came.items()})])
        if not why:
            content = [_taken(job), _described(job)]
            why = _problems((yield Order(_servers(job, content), MAKE_ALL)))
        if why:
            raise RefusedError(f"ps.recover: tables cannot be made anew: {why}")
        return {"servers": job.server_numbers, "tables": _described(job), "taken": _taken(job)}

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        return RECOVERING, "", sorted(_missing(job, asked))


def _taken(job: Job) -> list[Newcomer]:
    """Return who has the place of another, in the order in which they came."""
    return [*job.newcomers.taken.values()]


def _described(job: Job) -> list[dict[str, Any]]:
    return [table.described() for table in job.tables.values() if table.is_open]


@dataclass(frozen=True)
class GoOn:
    """Training goes on once all workers have come: what the lowest has to say, all get.

    Attributes:
        servers: that live, as far as the rank knows that asks.
        said: the manifest that it has restored, or why it could not; None: nothing.
    """

    servers: tuple[int, ...]
    said: Mapping[str, Any] | None = field(hash=False)

    key: ClassVar[Hashable] = "go on from a checkpoint"
    is_about_tables: ClassVar[bool] = False

    def script(self, job: Job, asked: list[Asked]) -> Script:
        yield Until(lambda: not _missing(job, asked))
        came = _latest(asked)
        if not came:
            return None
        lowest = min(came)
        said = came[lowest].said
        if said is not None and "manifest" in said:  # else nothing is restored yet
            job.recovered = Recovered(job.server_numbers, said)
        return {"said": said, "restores": lowest}

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        return RECOVERING, "", sorted(_missing(job, asked))


@dataclass(frozen=True)
class Follow:
    """A rank that is no worker goes on with its tables once the workers do; nobody waits for it.

    Like a worker, it counts only if it knows the same servers as the leader: with the recovery from
    a death before the last one, its tables would be gone again, and nobody would tell it.

    Attributes:
        rank: see above.
        servers: that live, as far as the rank knows.
        tables: that it uses.
        keeps_place: it has taken the place of another.
    """

    rank: int
    servers: tuple[int, ...]
    tables: tuple[str, ...]
    keeps_place: bool

    is_about_tables: ClassVar[bool] = False

    @property
    def key(self) -> Hashable:
        return "follow", self.rank

    def script(self, job: Job, asked: list[Asked]) -> Script:
        yield Until(lambda: self._is_now(job, asked) or not self._workers(job))
        if not self._workers(job):
            return {"tables": None}
        assert job.recovered is not None
        for table in job.tables.values():
            if table.is_open and table.name in self.tables:
                table.openers.add(self.rank)
        return {
            "servers": job.server_numbers, "tables": _described(job), "taken": _taken(job),
            "said": job.recovered.said,
        }  # fmt: skip

    def _is_now(self, job: Job, asked: list[Asked]) -> bool:
        is_recovered = job.recovered is not None and job.recovered.servers == job.server_numbers
        return is_recovered and bool(_knowing(job, asked))

    def _workers(self, job: Job) -> set[int]:
        return {*job.workers} - {*job.following}

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del asked
        return RECOVERING, "", sorted(self._workers(job))


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

    def script(self, job: Job, asked: list[Asked]) -> Script:
        if self.table not in job.tables:
            raise RefusedError(f"there is no table {self.table}")
        table = job.tables[self.table]

        def is_unused() -> bool:
            table.openers -= {each.request.source for each in asked}
            return all(rank in job.left for rank in table.openers)

        yield Until(lambda: is_unused() and job.move_lock.is_free)
        yield Do([Discard(self.table)])
        yield Order(_servers(job, self.table), DROP)

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del asked
        table = job.tables.get(self.table)
        if table is None:  # other servers are about to drop it
            return CLOSING, "", []
        return CLOSING, table.name, sorted({*table.openers} & {*job.live_workers})


@dataclass(frozen=True)
class Pause:
    """Nothing moves from one server to another until its owner ends it, or is gone.

    Attributes:
        number: says who owns it, see ringcomm.ps.moment_numbers.
        patience_s: for so long it lets moves go first that wait.
    """

    number: int
    patience_s: float

    is_about_tables: ClassVar[bool] = False

    @property
    def key(self) -> Hashable:
        return "pause", self.number

    def script(self, job: Job, asked: list[Asked]) -> Script:
        def is_over() -> bool:
            has_ended = any(isinstance(each.command, End) for each in asked)
            return has_ended or owner_of(self.number) in job.left

        yield Until(lambda: job.move_lock.pause(self.number, self.patience_s) or is_over())
        why = "" if is_over() else (yield from self._while_paused(job, asked, is_over))
        job.move_lock.unpause(self.number)
        if why and not is_over():
            raise RefusedError(why)

    def _while_paused(self, job: Job, asked: list[Asked], is_over: Callable[[], bool]) -> Script:
        """Go on until it is over, or return why it cannot."""
        del asked
        yield Told(_moment(job))
        yield Until(is_over)
        return ""

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del job, asked
        return "ps.snapshot()", "", []


def _moment(job: Job) -> dict[str, Any]:
    tables = {number: table.spec for number, table in job.tables.items() if table.is_open}
    return {"job": job.name, "tables": tables, "rounds": {}}


@dataclass(frozen=True)
class Snapshot(Pause):
    """Servers hold the values of one moment: of tables with rounds, all after the same round.

    Rounds are kept from ending until each server holds what it has after as many as the first of
    them had. Else training that is fast would be ahead of each moment.

    Attributes:
        save_to: folder of the checkpoint that it is for; None: it is for pulls.
    """

    save_to: str | None

    is_about_tables: ClassVar[bool] = True

    def _while_paused(self, job: Job, asked: list[Asked], is_over: Callable[[], bool]) -> Script:
        why = f"ps.snapshot: in {_TRIES} attempts there were new tables, of which a round was over "
        why += "before all servers knew them. Take it once all tables are there"
        moment = _moment(job)  # all servers have these tables
        for _ in range(_TRIES):
            stopped = yield Order(_all_servers(job, self.number), STOP, is_over)
            if is_over():
                break
            rounds: Counter[int] = Counter()
            for over in stopped.values():
                for table, n in over.items():
                    rounds[int(table)] = max(rounds[int(table)], n)
            content = [self.number, self.save_to, dict(rounds)]
            held = yield Order(_all_servers(job, content), HOLD, is_over)
            problems = _problems(held)
            if problems or is_over():
                why = f"ps.snapshot: {problems}"
                break
            if all(each["is_whole"] for each in held.values()):
                yield Told({**moment, "rounds": dict(rounds)})
                yield Until(is_over)
                break
            yield Order(_all_servers(job, [self.number, False]), LET)
        keeps = any(isinstance(each.command, End) and each.command.is_taken for each in asked)
        yield Order(_all_servers(job, [self.number, keeps]), LET)
        return why


@dataclass(frozen=True)
class End:
    """A pause, or a snapshot, is over; see Pause.

    Attributes:
        number: of it.
        is_taken: what was held for a checkpoint is still to be written.
    """

    number: int
    is_taken: bool

    is_about_tables: ClassVar[bool] = False

    @property
    def key(self) -> Hashable:
        return "pause", self.number

    def script(self, job: Job, asked: list[Asked]) -> Script:
        del asked
        job.move_lock.unpause(self.number)  # a server was lost, and with it the snapshot
        yield from ()

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del job, asked
        return "ps.snapshot()", "", []


@dataclass(frozen=True)
class Migrate:
    """Partitions get new owners, one migration after the other; see core.migration.

    Attributes:
        moves: those of a dense table go one by one, of a hash table AT_ONCE in one migration.
        owner: the rank that has asked; the moves end if it leaves. None: the leader itself.
        number: of the request.
        changes_places: partitions leave servers that have no place any more.
    """

    moves: tuple[Move, ...]
    owner: int | None
    number: int
    changes_places: bool = False

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "migrate", self.owner, self.number

    def script(self, job: Job, asked: list[Asked]) -> Script:
        del asked
        for each in self.moves:
            table = job.tables.get(each.partition[0])
            is_there = table is None or 0 <= each.partition[1] < len(table.owners)
            if not is_there or each.dest not in job.server_numbers:
                raise RefusedError(f"ps.rebalance: cannot do {each}")
        lock, left, n_moved, problems = job.move_lock, deque(self.moves), 0, list[str]()
        lock.wait(self.key)
        while left:
            yield Until(lambda: self._may_go_on(job, left[0]))
            if self.owner in job.left:
                break
            if due := _next_migration(job, left):
                table = job.tables[due[0].partition[0]]
                lock.begin(table.key_of(due[0].partition[1]))
                moved, why_not = yield from _migrate(job, table, due)
                lock.end()
                n_moved, problems = n_moved + moved, problems + why_not
        lock.leave(self.key)
        return {"moved": n_moved, "problems": problems[:5]}

    def _may_go_on(self, job: Job, move: Move) -> bool:
        if self.owner in job.left:
            return True
        table = job.tables.get(move.partition[0])
        return job.move_lock.may_move(self.key) and (table is None or table.is_open)

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del asked
        pausing = {owner_of(number) for number in job.move_lock.pauses}
        return MOVING, "", sorted(pausing & {*job.live_workers})


def _next_migration(job: Job, left: deque[Move]) -> list[Move]:
    """Take the next moves that share a migration out of those that are left."""
    number, moves = left[0].partition[0], dict[int, Move]()
    table = job.tables.get(number)  # None: it was closed meanwhile
    n = 1 if table is None or table.is_dense else AT_ONCE
    while left and left[0].partition[0] == number and len(moves) < n:
        move = left.popleft()
        moves[move.partition[1]] = move
    owners = {} if table is None else dict(enumerate(table.owners))
    return [each for part, each in moves.items() if owners.get(part, each.dest) != each.dest]


def _migrate(
    job: Job, table: ServedTable, moves: list[Move]
) -> Generator[Order | Do, Any, tuple[int, list[str]]]:
    """Let partitions of one unit change their owners; return how many did, and why others not."""
    owners = {each.partition[1]: table.owners[each.partition[1]] for each in moves}
    key = table.key_of(moves[0].partition[1])
    ends = {*owners.values(), *(each.dest for each in moves)}
    servers = ends if table.is_dense else job.server_numbers

    def order(do: str, to: Iterable[int] = servers, **more: Any) -> Order:
        return Order(_told_servers(to, [key, more]), do)

    def stay(why: str) -> Generator[Order | Do, Any, tuple[int, list[str]]]:
        yield order(THAW)
        return 0, [f"table {table.name}: {why}"]

    frozen = yield order(FREEZE)
    if why_not := _problems(frozen):
        return (yield from stay(why_not))
    pending = {worker for each in frozen.values() for worker in each["pending"]}
    # It could not contribute again; or the round would end before it does, for nobody waits for it.
    if gone := sorted(pending - {*job.live_workers}):
        return (yield from stay(
            f"worker {gone[0]} has left, or completes no more steps, and its part of a round waits "
            "for the others. Try again after the round"
        ))  # fmt: skip
    at = {tuple(each["at"]) for each in frozen.values() if each["at"] is not None}
    answers = frozen if len(at) < 2 else (yield order(DRAIN, at=max(at)))
    if why_not := _problems(answers):
        return (yield from stay(why_not))
    held = {tuple(each["held"]) for each in answers.values() if each["held"] is not None}
    if len(held) > 1:  # a worker died, and its gradient had come to some servers
        return (yield from stay(
            "a worker died, and its part of a round that waits for its release is on some servers "
            "alone. Try again after the round"
        ))  # fmt: skip
    sources: dict[int, list[tuple[int, int]]] = {}
    for each in moves:
        sources.setdefault(owners[each.partition[1]], []).append((each.partition[1], each.dest))
    contents = {Member(n, True): [key, {"moves": each}] for n, each in sorted(sources.items())}
    given = yield Order(contents, GIVE)
    if why_not := _problems(given):
        return (yield from stay(why_not))
    problems = [why for each in given.values() for why in each["problems"]]
    moved = [(part, dest) for each in given.values() for part, dest in each["moved"]]
    if not moved:
        yield order(THAW)
        return 0, problems
    clocks: dict[int, int] = {}
    for each in frozen.values():
        for worker, clock in each["clocks"]:
            clocks[worker] = min(clock, clocks.get(worker, clock))
    epoch = table.epoch_of(key) + 1
    more = {"epoch": epoch, "moved": moved, "clocks": [*clocks.items()]}
    if why_not := _problems((yield order(COMMIT, job.server_numbers, **more))):
        problems.append(why_not)
    yield Do([Notify(job.clients(), key)])
    return len(moved), problems


@dataclass(frozen=True)
class StandBy:
    """A rank waits for the place of a worker or an evaluator that dies, and takes it.

    A worker begins where the chief is, which stands still between two steps until all servers know
    it; or where no worker lives any more, behind what all had made. A rank has its place once all
    servers know it. It is told first: from then on it trains, whatever follows.

    Attributes:
        rank: see above.
        evaluates: it can be an evaluator, too.
    """

    rank: int
    evaluates: bool

    is_about_tables: ClassVar[bool] = True  # after a recovery it asks again

    @property
    def key(self) -> Hashable:
        return "stand by", self.rank

    def script(self, job: Job, asked: list[Asked]) -> Script:
        while True:
            yield Until(lambda: self._is_next(job) or self._is_over(job, asked))
            if not self._is_next(job):
                return None
            try:
                newcomer = yield from self._take_place(job, asked)
            except RefusedError:
                job.newcomers.coming = None
                raise
            job.newcomers.coming = None
            if newcomer is not None:
                return {"place": newcomer}

    def _is_gone(self, asked: list[Asked]) -> bool:
        return not any(each.command == self for each in asked)

    def _is_over(self, job: Job, asked: list[Asked]) -> bool:
        has_ended = job.newcomers.is_ending and not job.live_workers
        return has_ended or self._is_gone(asked)

    def _is_next(self, job: Job) -> bool:
        coming = job.newcomers.coming
        newcomer = job.next_newcomer() if coming is None else coming.newcomer
        return newcomer is not None and newcomer.rank == self.rank

    def _take_place(
        self, job: Job, asked: list[Asked]
    ) -> Generator[Order | Until, Any, Newcomer | None]:
        """Return what the rank is now; None: it has no place, as training is over, or it is gone.

        What it has been given is kept, with what it waits for: a copy of the leader that is made
        meanwhile begins this anew.
        """
        if job.newcomers.coming is None:
            newcomer = job.next_newcomer()
            assert newcomer is not None
            job.newcomers.coming = Coming(newcomer)
        coming = job.newcomers.coming
        newcomer, here = coming.newcomer, Here(self.rank, -1, 0, None)
        is_late = False
        while True:
            if newcomer.role == "worker":
                found = yield from self._beginning(job, asked, coming, again=is_late)
                if found is None:
                    return None
                here = found
            content = [newcomer, here.begins and here.begins.to_json(), here.beside]
            answers = yield Order(_all_servers(job, content), TAKE_PLACE)
            if not any(answers.values()):
                break
            yield Order(_all_servers(job, self.rank), RETRACT)
            if why := _problems(answers):
                raise RefusedError(f"ps.init: rank {self.rank} cannot take a place: {why}")
            if self._is_gone(asked):
                return None
            is_late, coming.n_heard = True, here.number
        taken = _taken(job)
        said = {"taken": taken, "begins": content[1], "calls": here.n_calls}
        yield Order(_told({self.rank}, said), BEGIN)
        others, evaluators = {*job.ranks} - {self.rank}, {*job.evaluators}
        # An evaluator may compute for long: nobody waits for its answer. A worker may hang: if the
        # newcomer gives up, so does this. Who comes next tells of both.
        yield Order(_told(others & evaluators, taken), MEET, lambda: True)
        yield Order(_told(others - evaluators, taken), MEET, lambda: self._is_gone(asked))
        return newcomer

    def _beginning(
        self, job: Job, asked: list[Asked], coming: Coming, *, again: bool
    ) -> Generator[Order | Until, Any, Here | None]:
        """Return where to begin, as a worker says that stands still; None: see above."""

        def here() -> Here | None:
            said = [each.command for each in asked if isinstance(each.command, Here)]
            return next(
                (x for x in said if x.beside == coming.beside and x.number > coming.n_heard), None
            )

        while job.live_workers:
            if again or coming.beside not in job.live_workers:
                again, chief = False, job.newcomers.first_of(job.live_workers)
                if chief != coming.beside:
                    coming.beside, coming.n_heard = chief, 0
                yield Order(_told({chief}, self.rank), STAND_STILL)
            yield Until(
                lambda: (
                    here() is not None
                    or coming.beside not in job.live_workers
                    or self._is_gone(asked)
                )
            )
            if self._is_gone(asked):
                return None
            if found := here():
                return found
        if job.newcomers.is_ending:
            return None
        answers = yield Order(_all_servers(job, [*job.newcomers.fallen]), HOW_FAR)
        if why := _problems(answers):
            raise RefusedError(f"ps.init: rank {self.rank} cannot take a place: {why}")
        job.newcomers.is_ending = any(each["begins"] is None for each in answers.values())
        if job.newcomers.is_ending or self._is_gone(asked):
            return None
        begins = [Beginning.of_json(each["begins"]) for each in answers.values()]
        return Here(self.rank, -1, 0, Beginning.behind(begins))

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del asked
        coming = job.newcomers.coming
        if coming is None or coming.beside is None:
            return JOINING, "", []
        return JOINING, "", [coming.beside]


@dataclass(frozen=True)
class Here:
    """A worker stands still between two steps: a newcomer begins there; see StandBy.

    Attributes:
        newcomer: its rank.
        beside: the worker; -1: none lives.
        number: of the request.
        begins: how far the worker is.
        n_calls: of should_stop() that it has made.
    """

    newcomer: int
    beside: int
    number: int
    begins: Beginning | None = field(hash=False)
    n_calls: int = 0

    is_about_tables: ClassVar[bool] = True

    @property
    def key(self) -> Hashable:
        return "stand by", self.newcomer

    def script(self, job: Job, asked: list[Asked]) -> Script:
        """Do nothing: the newcomer is gone."""
        del job, asked
        yield from ()

    def awaited(self, job: Job, asked: list[Asked]) -> _Awaited:
        del job, asked
        return JOINING, "", []


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
    if name == "pause":
        return Pause(content["number"], content["patience_s"])
    if name == "snapshot":
        return Snapshot(content["number"], content["patience_s"], content["save_to"])
    if name == "end":
        return End(content["number"], content["is_taken"])
    if name == "move":
        moves = (
            Move((table, part), source, dest) for table, part, source, dest in content["moves"]
        )
        return Migrate(tuple(moves), request.source, request.header.sequence)
    if name == "recover":
        return Recover(tuple(content["servers"]), content["tables"], content["has_checkpoint"])
    if name == "recovered":
        return GoOn(tuple(content["servers"]), content["said"])
    if name == "follow":
        servers, tables = tuple(content["servers"]), tuple(content["tables"])
        return Follow(request.source, servers, tables, content["keeps_place"])
    if name == "stand by":
        return StandBy(request.source, content["evaluates"])
    if name == "here":
        begins, n_calls = Beginning.of_json(content["begins"]), content["calls"]
        return Here(content["newcomer"], request.source, request.header.sequence, begins, n_calls)
    raise ValueError(f"there is no command {name!r}")
