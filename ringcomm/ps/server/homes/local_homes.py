"""The homes of which one process has a copy: frames and deaths are handed to them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from ringcomm.ps.placement.places import next_swap
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import CopyOption, FrameHeader, FrameKind, NewsOption
from ringcomm.ps.server.display import Display
from ringcomm.ps.server.homes.home import Home

if TYPE_CHECKING:
    from ringcomm.ps.protocol.link import Delivery, Link
    from ringcomm.ps.roles import Layout
    from ringcomm.ps.server.clock import CopiedClock
    from ringcomm.ps.server.core.core import Core
    from ringcomm.ps.server.homes.home_link import HomeLink
    from ringcomm.ps.server.homes.home_pushes import HomePushes
    from ringcomm.ps.server.server import Server

_PLACES_S: Final = 0.05  # between two looks at which servers have partitions
_log: Final = logging.getLogger("ringcomm")


class Homes:
    """All that a server's process has: its own home, and a copy of the one before it in the ring.

    Args:
        index: number of the home that begins here.
        layout: who is who.
        link: the wire of this rank.
        make_server: makes the server of a home, which sees who is lost as both its copies do.
        make_pushes: likewise, what carries out pushes of a home without Python.

    Attributes:
        index: see above.
        display: what others see of this process.
    """

    def __init__(
        self,
        index: int,
        layout: Layout,
        link: Link,
        make_server: Callable[[int, Layout, HomeLink, CopiedClock], Server],
        make_pushes: Callable[[int], HomePushes],
    ) -> None:
        self.index, self._layout, self._link = index, layout, link
        self.display = Display()
        self._dead: set[int] = set()
        # By rank: the deaths of servers that it has spoken about, and the homes that it runs now of
        # which there are two copies.
        self._spoke_of: dict[int, set[int]] = {}
        self._copied: dict[int, set[int]] = {}
        self._places_at = 0.0  # when it looks at the places again
        self._make_server, self._make_pushes = make_server, make_pushes
        link.enter()
        try:
            self._homes = self._begin()
        finally:
            link.leave()

    def _begin(self) -> dict[int, Home]:
        index, layout, n = self.index, self._layout, len(self._layout.servers)
        before, behind = (index - 1) % n, layout.servers[(index + 1) % n]
        homes = {
            number: Home(
                number, layout, self._link, partial(self._make_server, number),
                self._make_pushes(number), is_primary=number == index,
                follower=behind if number == index else None,
            )
            for number in (index, before)
        }  # fmt: skip
        homes[index].say(CopyOption.NAME, meta=homes[index].server.job.encode())
        return homes

    @property
    def core(self) -> Core:
        """Of the home that began here: knows which clients there are."""
        return self._homes[self.index].server.core

    def answers_for(self, number: int) -> bool:
        home = self._homes.get(number)
        return home is not None and home.is_primary

    @property
    def is_over(self) -> bool:
        return all(home.is_over for home in self._homes.values())

    def look(self) -> None:
        """Do what is due by now; at each poll."""
        for home in self._homes.values():
            home.look()
        self.display.show(self._counts)
        if self._layout.spares and self.answers_for(self._layout.leader):
            self._look_at_places()
        if any(home.lacks_follower for home in self._homes.values()):
            self._restore_copies()

    def _look_at_places(self) -> None:
        """Let a spare take the place of a home that shares a process, once all have copies again.

        And let partitions go on from homes without a place that have some: a move may have failed.
        """
        layout, home, now = self._layout, self._homes[self._layout.leader], time.monotonic()
        catalog, core = home.server.catalog, home.server.core
        is_busy = home.n_places_said or core.changes_places or home.server.is_over
        if now < self._places_at or is_busy:
            return
        self._places_at = now + _PLACES_S
        hosts = layout.ranks_of_servers()
        swap = next_swap(hosts, catalog.places.vacant) if self._are_copied(hosts) else None
        if swap is not None:
            _log.warning(
                "ps: server %d, a spare, takes the place of server %d", swap[1], swap[0],
                extra={"event": "spare"},
            )  # fmt: skip
        if swap is not None or catalog.displaced(hosts):
            home.n_places_said += 1
            home.say(CopyOption.PLACES, meta=packed_json({"swap": swap, "hosts": [*hosts.items()]}))

    def _are_copied(self, hosts: Mapping[int, int]) -> bool:
        """Return True if there are two copies of all homes, as their servers have said.

        What one has said counts if it knew of all deaths then of which this process knows; it may
        have heard of one earlier than this process.
        """
        dead = self._dead.intersection(self._layout.servers)
        return all(
            rank not in dead
            and dead <= self._spoke_of.get(rank, set())
            and number in self._copied.get(rank, ())
            for number, rank in hosts.items()
        )

    def on_homes(self, rank: int, dead: int, copied: Collection[int]) -> None:
        """A server has said, after a death, of which homes that it runs there are two copies."""
        self._spoke_of.setdefault(rank, set()).add(dead)
        self._copied[rank] = {*copied}

    def _say_homes(self, dead: int) -> None:
        """Tell all ranks which homes run here, and of which of them there are two copies."""
        run = [home for home in self._homes.values() if home.is_primary]
        copied = [home.number for home in run if home.server.n_copies > 1]
        meta = packed_json({"runs": [home.number for home in run], "copied": copied})
        header = FrameHeader(FrameKind.NEWS, clock=dead, option=NewsOption.HOMES)
        for each in {*self._layout.ranks} - self._dead:
            self._link.send(each, header, meta)

    def _restore_copies(self) -> None:
        """Give each home that this server runs a copy on another server, if one lives."""
        servers, own = self._layout.servers, self.index
        behind = [each for each in (*servers[own + 1 :], *servers[:own]) if each not in self._dead]
        for home in self._homes.values():
            home.seek_follower(behind)

    def on_request(self, delivery: Delivery) -> None:
        header = delivery.header
        number = header.home - 1 if header.home else self.index
        if (
            header.kind == FrameKind.RECORD
            and header.option == CopyOption.PIECE
            and header.sequence == 1
        ):
            self._homes[number] = Home(
                number, self._layout, self._link, partial(self._make_server, number),
                self._make_pushes(number), is_primary=False, follower=None, is_whole=False,
            )  # fmt: skip
        home = self._homes.get(number)
        if home is not None:
            home.on_frame(delivery)
            if home.why_not:
                self._drop(home)

    def on_death(self, rank: int) -> None:
        """Go on without a client, or a server, that died; the link has forgotten it already."""
        layout, homes = self._layout, self._homes.values()
        self._dead.add(rank)
        if rank not in layout.servers:
            for home in homes:
                if home.is_primary:
                    home.say(CopyOption.DIED, rank)
            return
        promoted = []
        for home in [*homes]:
            if home.is_primary and home.follower == rank:
                home.lose_follower()
            elif not home.is_primary and layout.rank_of(home.number) == rank:
                if not home.is_whole:
                    _log.warning("ps: server %d died while a copy of it was made here", home.number)
                    self._drop(home)
                    continue
                home.promote()
                promoted.append(home)
                for each in self._dead - {rank}:
                    home.say(CopyOption.DIED, each)
                for lost in layout.lost:
                    home.say(CopyOption.LOST, lost)
        for home in homes:
            if home.is_primary:
                home.say(CopyOption.DIED, rank)
            home.on_copied = partial(self._say_homes, rank)
        self._say_homes(rank)
        for home in promoted:  # behind that: answers come here
            home.server.say_again()

    def on_loss(self, number: int) -> None:
        """Go on without a home of which no copy is left, until all recover."""
        for home in self._homes.values():
            if home.is_primary:
                home.say(CopyOption.LOST, number)

    def _drop(self, home: Home) -> None:
        del self._homes[home.number]
        home.drop()

    def on_taken(self, number: int) -> None:
        """Send a home that goes on, here or elsewhere, again what it has not answered."""
        for home in self._homes.values():
            home.order_again(number)

    def _counts(self) -> Counter[str]:
        """Return what this process serves, also in the place of a dead server, and its copies."""
        total = Counter(slices=0, shards=0, requests=0, copies=0, waiting=0)
        for home in self._homes.values():
            found = home.server.what_it_has()
            if not home.is_primary:
                found = Counter(copies=found["slices"] + found["shards"])
            total.update(found)
        return total
