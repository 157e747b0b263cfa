"""Which rank does what in a job with parameter servers: a decision, from what all ranks said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ringcomm.errors import ConfigError

Role = Literal["worker", "server", "evaluator"]
ROLES: Final[tuple[str, ...]] = get_args(Role)


@dataclass(frozen=True)
class Wish:
    """What one rank asked for in ps.init().

    Attributes:
        role: what its command says it is; None: what remains.
        servers: how many there shall be; None: as the others say.
        evaluators: how many there shall be among the ranks without a role.
        colocated: servers live in the processes of workers.
        replication: copies of each partition.
        placement: how partitions are spread.
        evaluates: a function is marked @ps.evaluator.
        functions: names of those that are marked @ps.function.
        rebalance_every_s: how often partitions may move by themselves; None: never.
    """

    role: str | None = None
    servers: int | None = None
    evaluators: int = 0
    colocated: bool = False
    replication: int = 1
    placement: str = "balanced"
    evaluates: bool = False
    functions: tuple[str, ...] = ()
    rebalance_every_s: float | None = None


@dataclass(frozen=True)
class Layout:
    """Who is who, by rank of the job; each ascending, but for servers, which are numbered so.

    Attributes:
        workers: train. Ranks of the default group, in this order; the first is the chief.
        servers: own partitions; the s-th is server s.
        evaluators: read snapshots. If one fails the job ends, as with any rank.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    evaluators: tuple[int, ...]

    def role_of(self, rank: int) -> Role:
        """Return what a rank is; a colocated server is a worker."""
        if rank in self.workers:
            return "worker"
        return "server" if rank in self.servers else "evaluator"

    @property
    def is_colocated(self) -> bool:
        """True if servers live in the processes of workers."""
        return not set(self.servers).isdisjoint(self.workers)


def assign(wishes: Sequence[Wish], hosts: Sequence[int]) -> Layout:
    """Return who is who.

    Servers are, of those that no command declares, one per host in turn from the highest rank
    down, evaluators the highest of the rest; so rank 0 is a worker.

    Args:
        wishes: of every rank.
        hosts: of every rank: the lowest rank of its host.

    Raises:
        ConfigError: they contradict each other, or no worker is left.
    """
    for rank, wish in enumerate(wishes):
        _require_sound(rank, wish)
    _require_alike(wishes)
    declared = {role: _declared(wishes, role) for role in ROLES}
    open_ranks = [rank for rank, wish in enumerate(wishes) if wish.role is None]
    servers = _servers(wishes, hosts, declared, open_ranks)
    if not wishes[0].colocated:
        open_ranks = [rank for rank in open_ranks if rank not in servers]
    evaluators, open_ranks = _evaluators(wishes, declared, open_ranks)
    workers = tuple(sorted([*declared["worker"], *open_ranks]))
    if not workers:
        raise ConfigError(
            f"ps.init: {_count(len(wishes), 'rank')}, of which {_count(len(servers), 'server')} "
            f"and {_count(len(evaluators), 'evaluator')}, leave no worker. Start more ranks, or "
            "ask for fewer servers"
        )
    return Layout(workers, tuple(servers), tuple(sorted(evaluators)))


def _require_sound(rank: int, wish: Wish) -> None:
    if wish.role is not None and wish.role not in ROLES:
        raise ConfigError(
            f"ps.init: rank {rank} says role={wish.role!r}; roles are {', '.join(ROLES)}"
        )
    every_s = wish.rebalance_every_s
    if every_s is not None and not 0 < every_s < math.inf:
        raise ConfigError(
            f"ps.init: rank {rank} says rebalance_every_s={every_s}; it must be more than 0"
        )
    for name, value, least in (
        ("servers", wish.servers, 1),
        ("evaluators", wish.evaluators, 0),
        ("replication", wish.replication, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"ps.init: rank {rank} says {name}={value}; at least {least}")


def _require_alike(wishes: Sequence[Wish]) -> None:
    """Refuse what ranks say differently; a command of servers alone need not repeat the counts."""
    first: dict[str, tuple[int, object]] = {}
    for rank, wish in enumerate(wishes):
        said: dict[str, object] = {}
        if wish.servers is not None:
            said["servers"] = wish.servers
        if wish.role is None:
            said["evaluators"] = wish.evaluators
        if wish.role != "server":
            said |= {"replication": wish.replication, "placement": wish.placement}
            said["colocated"] = wish.colocated
        if wish.role in (None, "worker"):
            said["rebalance_every_s"] = wish.rebalance_every_s
        for name, value in said.items():
            other, before = first.setdefault(name, (rank, value))
            if before != value:
                raise ConfigError(
                    f"ps.init: rank {other} says {name}={before!r}, rank {rank} says "
                    f"{name}={value!r}. Pass the same on all ranks"
                )


def _declared(wishes: Sequence[Wish], role: str) -> list[int]:
    return [rank for rank, wish in enumerate(wishes) if wish.role == role]


def _servers(
    wishes: Sequence[Wish],
    hosts: Sequence[int],
    declared: dict[str, list[int]],
    open_ranks: list[int],
) -> list[int]:
    asked = next((w.servers for w in wishes if w.servers is not None), None)
    found = declared["server"]
    if found:
        if asked is not None and asked != len(found):
            raise ConfigError(
                f"ps.init: servers={asked}, and {_count(len(found), 'rank')} "
                f"({', '.join(map(str, found))}) declare role='server'. Leave servers= out, or "
                f"start {asked} of them"
            )
        if wishes[open_ranks[0] if open_ranks else 0].colocated:
            raise ConfigError(
                "ps.init: colocated=True, and ranks declare role='server': it is one or the other"
            )
        return found
    count = 1 if asked is None else asked
    colocated = wishes[0].colocated
    candidates = sorted([*open_ranks, *declared["worker"]]) if colocated else open_ranks
    spare = len(candidates) - (0 if colocated or declared["worker"] else 1)
    if count > spare:
        raise ConfigError(
            f"ps.init: {_count(count, 'server')} asked for, and {_count(len(wishes), 'rank')} "
            f"started, of which {max(spare, 0)} can be one. Start more ranks (mpirun -np N), or "
            "ask for fewer servers (servers=, RINGCOMM_PS_SERVERS)"
        )
    return spread(candidates, hosts, count)


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
    wishes: Sequence[Wish], declared: dict[str, list[int]], open_ranks: list[int]
) -> tuple[list[int], list[int]]:
    """Return the evaluators, and the ranks that are still open."""
    found = declared["evaluator"]
    count = next((wish.evaluators for wish in wishes if wish.role is None), 0)
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
        if not wishes[rank].evaluates:
            raise ConfigError(
                f"ps.init: rank {rank} is to evaluate (evaluators={count}), and no function is "
                "marked @ps.evaluator(every=N). It must stand before ps.init()"
            )
    return chosen, rest


def _count(n: int, what: str) -> str:
    return f"{n} {what}" if n == 1 else f"{n} {what}s"
