"""Which servers have partitions, and which stand by. Pure.

A job with copies begins with as many places as ps.init(servers=) says; its spares have none. All of
them are homes, so a spare has all but partitions from the start: it knows the tables, hears of each
step, and has a copy of its own. So it gets a place by moves alone, which nobody has to wait for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ringcomm.ps.placement.partitions import Move
from ringcomm.ps.roles import Layout


class Places:
    """The servers that have partitions, as the leader knows them.

    Args:
        members: who is who.

    Attributes:
        vacant: servers without a place.
    """

    def __init__(self, members: Layout) -> None:
        self._members = members
        self.vacant: set[int] = set()
        self.restart()

    def restart(self) -> None:
        """Give a place to the lowest servers that live, to as many as at first."""
        self.vacant = {*self._members.server_numbers[self._members.n_places :]}

    @property
    def n_at_first(self) -> int:
        return min(self._members.n_places, len(self._members.server_numbers))

    def taken(self) -> list[int]:
        """Return the servers that have a place, ascending; all, if none of these lives."""
        servers = self._members.server_numbers
        return [n for n in servers if n not in self.vacant] or [*servers]

    def swap(self, gives: int, takes: int) -> None:
        if takes in self.vacant and gives not in self.vacant:
            self.vacant.remove(takes)
            self.vacant.add(gives)

    def add(self, servers: Collection[int]) -> None:
        others = sorted({*servers} - (self.vacant & {*self._members.server_numbers}))
        if others:
            raise ValueError(f"ps.add_servers: server {others[0]} is no spare any more. Try again")
        self.vacant.difference_update(servers)

    def remove(self, server: int, *others: int) -> None:
        """Leave a server without a place. Raises ValueError if it has none, or is the last.

        Args:
            server: its number.
            others: the servers that run in its process, which have no place any more, either.
        """
        taken = self.taken()
        if server not in taken:
            raise ValueError(
                f"ps.remove_server: server {server} has no partitions; those that have are "
                f"{', '.join(map(str, taken))}"
            )
        if {server, *others}.issuperset(taken):
            raise ValueError(f"ps.remove_server: server {server} is the only one with partitions")
        self.vacant.update((server, *others))

    def moves(self, table: int, owners: Sequence[int], hosts: Mapping[int, int]) -> list[Move]:
        """Return moves of the partitions whose owner has no place.

        Each goes to the process that has the fewest, there to the server that has the fewest.

        Args:
            table: its number.
            owners: of its partitions.
            hosts: the rank of each server, as far as who asks for moves knows it. Both copies of a
                leader get the same; by themselves they may hear of another at different moments.
        """
        taken = self.taken()
        process = {server: hosts.get(server, -1 - server) for server in taken}
        of_server = Counter(owner for owner in owners if owner in process)
        of_process = Counter(process[server] for server in of_server.elements())
        moves = []
        for part, owner in enumerate(owners):
            if owner in self.vacant and owner not in process:
                dest = min(
                    taken, key=lambda each: (of_process[process[each]], of_server[each], each)
                )
                of_server[dest] += 1
                of_process[process[dest]] += 1
                moves.append(Move((table, part), owner, dest))
        return moves


def next_swap(hosts: Mapping[int, int], vacant: Collection[int]) -> tuple[int, int] | None:
    """Return a server that shares a process with another, and a spare that shall take its place.

    Args:
        hosts: the rank of each server that lives.
        vacant: servers without a place.

    Returns:
        None: no process has two with a place, or each has one.
    """
    by_rank: dict[int, list[int]] = {}
    for server, rank in hosts.items():
        if server not in vacant:
            by_rank.setdefault(rank, []).append(server)
    free = [server for server in vacant if server in hosts and hosts[server] not in by_rank]
    crowded = [servers for servers in by_rank.values() if len(servers) > 1]
    if not free or not crowded:
        return None
    most = max(crowded, key=len)
    return min(most), min(free)
