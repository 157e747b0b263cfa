"""Who is who: the role of each rank, by the arguments of ps.init(), and who runs each home. Pure.

When a server dies, each server that lives tells all ranks which homes it runs from now on. A home
is lost once all have said so of all the dead, and none of them runs it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from ringcomm.errors import ConfigError
from ringcomm.ps.placement.replacement_workers import Newcomer

Role = Literal["worker", "server", "evaluator", "spare"]
ROLES: Final = ("worker", "server", "evaluator")  # those that a command may declare


class InitOptions(NamedTuple):
    """The arguments of one rank to ps.init().

    Attributes:
        role: of its command; None: what remains.
        servers: how many; None: as other ranks say.
        evaluators: how many among the ranks without a role.
        spares: how many servers more there are than hold partitions.
        worker_spares: how many ranks wait for the place of a worker or an evaluator.
        colocated: servers live in the processes of workers.
        dead: ranks that died.
        replication: copies of each partition.
        evaluates: a function is marked @ps.evaluator.
        functions: names of those that are marked @ps.function.
    """

    role: str | None = None
    servers: int | None = None
    evaluators: int = 0
    spares: int = 0
    colocated: bool = False
    replication: int = 1
    evaluates: bool = False
    functions: tuple[str, ...] = ()
    worker_spares: int = 0


@dataclass
class Layout:
    """The role of each rank. All ranks are of the job.

    Attributes:
        workers: train, by place. The default group, in this order, as long as nobody has joined.
        servers: own partitions, by server number; the spares are the last ones.
        evaluators: read snapshots.
        gone: workers that cannot follow a chief that died: they died, or had left by then.
        replication: copies of what each server has.
        spares: how many servers begin without partitions, to take the places of others. With copies
            they take part in all else from the start; without, once they have a place.
        lost: numbers of servers that died, with all copies of what they had.
        hosts: ranks of the servers whose first process died, by number; see rank_of().
        waiting: stood by at first, for the place of a worker or an evaluator.
        joined: numbers of those that have one by now, in the order in which they came.
        filled: who has the place of a rank that died.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    evaluators: tuple[int, ...]
    gone: set[int] = field(default_factory=set, compare=False)
    dead: set[int] = field(default_factory=set, compare=False)
    replication: int = 1
    spares: int = 0
    lost: set[int] = field(default_factory=set, compare=False)
    hosts: dict[int, int] = field(default_factory=dict, compare=False)
    waiting: tuple[int, ...] = ()
    joined: dict[int, int] = field(default_factory=dict, compare=False)
    filled: dict[int, Newcomer] = field(default_factory=dict, compare=False)

    @property
    def chief(self) -> int:
        """The worker that initialises, checkpoints and logs: the lowest one that is not gone.

        One that has joined is higher than all that were there before.
        """
        return self._lowest_but(self.gone)

    def acting_chief(self, gone: Collection[int]) -> int:
        """Return who does the work of the chief: the lowest worker that neither died nor left.

        One that has left stays the chief, so that programs do once what they do at their end.

        Args:
            gone: ranks that died or have left, as this rank knows.
        """
        return self.chief if self.chief not in gone else self._lowest_but({*self.gone, *gone})

    def _lowest_but(self, gone: Collection[int]) -> int:
        workers = sorted(self.workers, key=lambda rank: self.joined.get(rank, 0))
        return next((rank for rank in workers if rank not in gone), workers[0])

    def join(self, newcomer: Newcomer) -> bool:
        """Give a rank the place of one that died; return False if it had it already."""
        rank, role, place, number = newcomer
        if rank in self.joined:
            return False
        self.joined[rank], self.filled[place] = number, newcomer
        places = self.workers if role == "worker" else self.evaluators
        filled = tuple(rank if each == place else each for each in places)
        if role == "worker":
            self.workers = filled
        else:
            self.evaluators = filled
        return True

    def newcomer(self, rank: int) -> Newcomer:
        """Return the place that a rank has taken. Raises StopIteration: it has taken none."""
        return next(each for each in self.filled.values() if each.rank == rank)

    @property
    def ranks(self) -> set[int]:
        """All ranks, but those whose place another has."""
        return {*self.workers, *self.servers, *self.evaluators, *self.waiting}

    @property
    def standing_by(self) -> set[int]:
        return {*self.waiting} - self.joined.keys() - self.dead

    @property
    def survivable(self) -> frozenset[int]:
        """The ranks that may die in an elastic job: all but colocated servers, and the last one."""
        clients = {*self.workers, *self.evaluators, *self.waiting, *self.filled} - {*self.servers}
        live = {*self.servers} - self.dead
        if self.is_colocated or len(live) > 1:
            return frozenset(clients if self.is_colocated else {*clients, *self.servers})
        return frozenset({*clients, *self.servers} - live)

    def lose(self, rank: int, left: Collection[int]) -> bool:
        """Take note that a rank died; return True if another worker is the chief now.

        Args:
            rank: see above.
            left: ranks that have left in order. A chief that has is followed by nobody.
        """
        before = self.chief
        self.dead.add(rank)
        if rank in self.servers and self.replication == 1:
            self.lost.add(self.number_of(rank))
        self.gone.add(rank)
        if rank == before:
            self.gone.update(left)
        return self.chief != before

    @property
    def n_places(self) -> int:
        return len(self.servers) - self.spares

    @property
    def server_numbers(self) -> tuple[int, ...]:
        """The numbers of the servers that live, by which messages and views name them.

        Without copies, of the spares only those that have a place: the lowest for each server lost.
        """
        if not self.lost:
            n = len(self.servers) if self.replication > 1 else self.n_places
            return tuple(range(n))
        live = tuple(n for n in range(len(self.servers)) if n not in self.lost)
        return live if self.replication > 1 else live[: self.n_places]

    @property
    def n_losses(self) -> int:
        """How many servers were lost that had a place.

        Ranks that know the same servers know the same number, in whatever order they have heard of
        the deaths: a spare that died without a place counts once a higher one has a place.
        """
        servers = self.server_numbers
        if self.replication > 1 or len(servers) < self.n_places:
            return len(self.lost)
        return sum(number < servers[-1] for number in self.lost)

    def know(self, servers: Collection[int]) -> None:
        """Take note of losses of which another rank has heard, which knows these servers."""
        is_full = self.replication == 1 and len(servers) == self.n_places
        self.lost.update({*range(max(servers) if is_full else len(self.servers))} - {*servers})

    @property
    def leader(self) -> int:
        """The server that opens tables, and decides what moves: the lowest that lives."""
        return self.server_numbers[0]

    def rank_of(self, server: int) -> int:
        """Return the rank where a server runs: where it began, or where its other copy is."""
        return self.hosts.get(server, self.servers[server]) if self.hosts else self.servers[server]

    def ranks_of_servers(self) -> dict[int, int]:
        return {number: self.rank_of(number) for number in self.server_numbers}

    def address_of(self, server: int) -> int:
        """Return the rank by which servers name each other: where it began."""
        return self.servers[server]

    def number_of(self, rank: int) -> int:
        """Return the number of the server that began on a rank. Raises ValueError."""
        return self.servers.index(rank)

    def role_of(self, rank: int) -> Role:
        """Return the role of a rank; a colocated server is a worker."""
        if rank in self.filled:
            return self.role_of(self.filled[rank].rank)
        if rank in self.workers:
            return "worker"
        if rank in self.servers:
            return "server"
        return "evaluator" if rank in self.evaluators else "spare"

    def place_of(self, rank: int) -> int:
        """Return the place of a rank among those of its role. Raises ValueError."""
        while rank in self.filled:
            rank = self.filled[rank].rank
        of_role = {
            "worker": self.workers, "server": self.servers, "evaluator": self.evaluators,
            "spare": self.waiting,
        }  # fmt: skip
        return of_role[self.role_of(rank)].index(rank)

    @property
    def is_colocated(self) -> bool:
        return not set(self.servers).isdisjoint(self.workers)


def assign(all_options: Sequence[InitOptions], hosts: Sequence[int]) -> Layout:
    """Return the role of each rank.

    Of the ranks whose command declares no role, the highest are spares, servers are one per host in
    turn, from the highest of the others down, and evaluators the highest of the rest; so rank 0 is
    a worker. Of the ranks that declare to be servers the highest are the spares. The highest of the
    workers wait for the place of another.

    Args:
        all_options: of every rank.
        hosts: of every rank: the lowest rank of its host.

    Raises:
        ConfigError: they contradict each other, or no worker is left.
    """
    for rank, options in enumerate(all_options):
        _require_sound(rank, options)
    _require_alike(all_options)
    declared = {role: _declared(all_options, role) for role in ROLES}
    open_ranks = [rank for rank, options in enumerate(all_options) if options.role is None]
    n_spares = next((w.spares for w in all_options if w.role != "server"), 0)
    servers = _servers(all_options, hosts, declared, open_ranks, n_spares)
    if not all_options[0].colocated:
        open_ranks = [rank for rank in open_ranks if rank not in servers]
    evaluators, open_ranks = _evaluators(all_options, declared, open_ranks)
    workers = tuple(sorted([*declared["worker"], *open_ranks]))
    if not workers:
        raise ConfigError(
            f"ps.init: {_count(len(all_options), 'rank')}, of which "
            f"{_count(len(servers), 'server')} and {_count(len(evaluators), 'evaluator')}, leave "
            "no worker. Start more ranks, or ask for fewer servers"
        )
    replication = next(w.replication for w in all_options if w.role != "server")
    n_waiting = next(w.worker_spares for w in all_options if w.role != "server")
    if n_waiting >= len(workers):
        raise ConfigError(
            f"ps.init: worker_spares={n_waiting} asked for, and {_count(len(workers), 'rank')} "
            "can be worker or stand by, of which one must be a worker. Start more ranks "
            "(mpirun -np N)"
        )
    at = len(workers) - n_waiting
    return Layout(
        workers[:at], tuple(servers), tuple(sorted(evaluators)), replication=replication,
        spares=n_spares, waiting=workers[at:],
    )  # fmt: skip


def refuse_what_cannot_be(layout: Layout, *, is_elastic: bool) -> None:
    """Raise ConfigError for what does not go together with copies, or spares."""
    n, why = layout.replication, ""
    if n > 2:
        why = "there are at most 2 copies"
    elif n == 2 and len(layout.servers) < 2:
        why = f"each copy needs a server of its own, and servers={len(layout.servers)}"
    elif n == 2 and layout.is_colocated:
        why = "it does not go with colocated=True yet"
    elif n == 2 and not is_elastic:
        why = "without RINGCOMM_ELASTIC=1 any death ends the job, whatever is copied"
    if why:
        raise ConfigError(f"ps.init: replication={n}: {why}")
    if layout.spares and layout.is_colocated:
        why = "it does not go with colocated=True, where the death of a server ends the job"
    elif layout.spares and not is_elastic:
        why = "without RINGCOMM_ELASTIC=1 any death ends the job, and there is no place to take"
    if why:
        raise ConfigError(f"ps.init: spares={layout.spares}: {why}")
    if layout.waiting and not is_elastic:
        raise ConfigError(
            f"ps.init: worker_spares={len(layout.waiting)}: without RINGCOMM_ELASTIC=1 any death "
            "ends the job, and there is no place to take"
        )


def _require_sound(rank: int, options: InitOptions) -> None:
    if options.role is not None and options.role not in ROLES:
        raise ConfigError(
            f"ps.init: rank {rank} says role={options.role!r}; roles are {', '.join(ROLES)}"
        )
    if options.worker_spares and options.colocated:
        raise ConfigError(
            f"ps.init: worker_spares={options.worker_spares}: it does not go with colocated=True, "
            "where the death of a worker ends the job"
        )
    for name, value, least in (
        ("servers", options.servers, 1),
        ("evaluators", options.evaluators, 0),
        ("spares", options.spares, 0),
        ("worker_spares", options.worker_spares, 0),
        ("replication", options.replication, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"ps.init: rank {rank} says {name}={value}; at least {least}")


def _require_alike(all_options: Sequence[InitOptions]) -> None:
    """Refuse arguments that differ; a command of servers alone need not repeat the counts."""
    first: dict[str, tuple[int, object]] = {}
    for rank, options in enumerate(all_options):
        values: dict[str, object] = {}
        if options.servers is not None:
            values["servers"] = options.servers
        if options.role is None:
            values["evaluators"] = options.evaluators
        if options.role != "server":
            values |= {"replication": options.replication, "colocated": options.colocated}
            values |= {"spares": options.spares, "worker_spares": options.worker_spares}
        for name, value in values.items():
            other, before = first.setdefault(name, (rank, value))
            if before != value:
                raise ConfigError(
                    f"ps.init: rank {other} says {name}={before!r}, rank {rank} says "
                    f"{name}={value!r}. Pass the same on all ranks"
                )


def _declared(all_options: Sequence[InitOptions], role: str) -> list[int]:
    return [rank for rank, options in enumerate(all_options) if options.role == role]


def _servers(
    all_options: Sequence[InitOptions],
    hosts: Sequence[int],
    declared: dict[str, list[int]],
    open_ranks: list[int],
    n_spares: int,
) -> list[int]:
    """Return the ranks of the servers, ascending; the last ones are the spares."""
    asked = next((w.servers for w in all_options if w.servers is not None), None)
    found = declared["server"]
    if found:
        if asked is not None and asked + n_spares != len(found):
            of_spares = f" and spares={n_spares}" if n_spares else ""
            raise ConfigError(
                f"ps.init: servers={asked}{of_spares}, and {_count(len(found), 'rank')} "
                f"({', '.join(map(str, found))}) declare role='server'. Leave servers= out, or "
                f"start {asked + n_spares} of them"
            )
        if n_spares >= len(found):
            raise ConfigError(
                f"ps.init: spares={n_spares}, and {_count(len(found), 'rank')} "
                f"({', '.join(map(str, found))}) declare role='server', which leaves no server. "
                f"Start more of them, or ask for fewer spares"
            )
        if all_options[open_ranks[0] if open_ranks else 0].colocated:
            raise ConfigError(
                "ps.init: colocated=True, and ranks declare role='server': it is one or the other"
            )
        return found
    count = 1 if asked is None else asked
    colocated = all_options[0].colocated
    candidates = sorted([*open_ranks, *declared["worker"]]) if colocated else open_ranks
    spare = len(candidates) - (0 if colocated or declared["worker"] else 1)
    if count + n_spares > spare:
        asked_for = _count(count, "server") + (f" and {_count(n_spares, 'spare')}" * bool(n_spares))
        raise ConfigError(
            f"ps.init: {asked_for} asked for, and {_count(len(all_options), 'rank')} "
            f"started, of which {max(spare, 0)} can be one. Start more ranks (mpirun -np N), or "
            "ask for fewer servers (servers=, RINGCOMM_PS_SERVERS)"
        )
    at = len(candidates) - n_spares
    return [*spread(candidates[:at], hosts, count), *candidates[at:]]


def spread(ranks: Sequence[int], hosts: Sequence[int], count: int) -> list[int]:
    """Return `count` of the ranks, ascending: the highest of each host in turn."""
    left = sorted(ranks)
    taken: list[int] = []
    while len(taken) < count:
        per_host = Counter(hosts[rank] for rank in taken)
        fewest = min(per_host[hosts[rank]] for rank in left)
        best = max(rank for rank in left if per_host[hosts[rank]] == fewest)
        left.remove(best)
        taken.append(best)
    return sorted(taken)


def _evaluators(
    all_options: Sequence[InitOptions], declared: dict[str, list[int]], open_ranks: list[int]
) -> tuple[list[int], list[int]]:
    """Return the evaluators, and the ranks that are still open."""
    found = declared["evaluator"]
    count = next((options.evaluators for options in all_options if options.role is None), 0)
    if found and count not in (0, len(found)):
        raise ConfigError(
            f"ps.init: evaluators={count}, and {_count(len(found), 'rank')} "
            f"({', '.join(map(str, found))}) declare role='evaluator'. Leave evaluators= out"
        )
    if found or count == 0:
        return found, open_ranks
    if count > len(open_ranks):
        raise ConfigError(
            f"ps.init: {_count(count, 'evaluator')} asked for, and "
            f"{_count(len(open_ranks), 'rank')} can be one. Start more ranks (mpirun -np N)"
        )
    split = len(open_ranks) - count
    chosen, rest = open_ranks[split:], open_ranks[:split]
    for rank in chosen:
        if not all_options[rank].evaluates:
            raise ConfigError(
                f"ps.init: rank {rank} is to evaluate (evaluators={count}), and no function is "
                "marked @ps.evaluator(every=N). It must stand before ps.init()"
            )
    return chosen, rest


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


class Takeovers:
    """Decides where homes run.

    Args:
        layout: who is who; this changes its `hosts`.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._dead: set[int] = set()
        self._said: dict[int, set[int]] = {}  # by dead rank: the servers that have spoken

    def died(self, rank: int) -> None:
        self._dead.add(rank)

    def said(self, rank: int, dead: int, homes: Sequence[int]) -> list[int]:
        """A server has said which homes it runs, after a death; return those that are new there.

        What a server said comes late if others have spoken of its death: they may run them by now.
        """
        is_late = rank in self._said
        self._said.setdefault(dead, set()).add(rank)
        if is_late:
            return []
        taken = [home for home in homes if self._layout.rank_of(home) != rank]
        self._layout.hosts.update(dict.fromkeys(taken, rank))
        return taken

    def lost(self) -> list[int]:
        """Return the homes that no server has any more."""
        live = {*self._layout.servers} - self._dead
        homes = self._layout.server_numbers
        orphans = [home for home in homes if self._layout.rank_of(home) in self._dead]
        return orphans if orphans and self._all_spoke(live) else []

    def _all_spoke(self, live: Collection[int]) -> bool:
        return all({*live} <= self._said.get(rank, set()) for rank in self._dead)
