"""One copy of a home: a server, and what makes it do the same as its other copy.

See ringcomm.ps.server.homes.replication for the protocol.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ringcomm.ps.protocol.frames import CopyOption, FilesOption, FrameHeader, FrameKind
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.server.clock import CopiedClock, OwnClock
from ringcomm.ps.server.homes.copy_transfer import SendWholeCopy, take_pieces
from ringcomm.ps.server.homes.home_link import NO_BODY, HomeLink
from ringcomm.ps.server.homes.records import Entry, entry_of, send_drop, send_record, send_report
from ringcomm.ps.server.homes.replication import Came, Log
from ringcomm.ps.server.homes.whole_copy import is_read, may_be_copied

if TYPE_CHECKING:
    from ringcomm.ps.protocol.link import Link
    from ringcomm.ps.roles import Layout
    from ringcomm.ps.server.homes.home_pushes import HomePushes
    from ringcomm.ps.server.server import Server

_log: Final = logging.getLogger("ringcomm")


class Home:
    """A copy of a home in this process.

    Args:
        number: of the home.
        layout: who is who.
        link: the wire of this rank.
        make_server: makes the server, with its wire and its clock; it sees who is lost by frames.
        pushes: those that C++ carries out.
        is_primary: this copy answers.
        follower: rank of the other copy, if this is the primary and there is one.
        is_whole: it has all that the other copy has.

    Attributes:
        number, is_primary, follower, is_whole: see above.
        on_copied: called when there are two copies again.
        n_places_said: frames of CopyOption.PLACES that are not carried out yet.
        why_not: why it cannot be a copy; empty: it can.
        server: what this copy has, and decides.
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
        link: Link,
        make_server: Callable[[Layout, HomeLink, CopiedClock], Server],
        pushes: HomePushes,
        *,
        is_primary: bool,
        follower: int | None,
        is_whole: bool = True,
    ) -> None:
        self.is_whole, self.why_not = is_whole, ""
        self.on_copied: Callable[[], object] = lambda: None
        self.n_places_said = 0
        self._sending: SendWholeCopy | None = None  # the follower has not got all yet
        self._refused: set[int] = set()  # ranks that cannot be the follower
        self.number, self._layout, self._link = number, layout, link
        self.follower = follower
        self._clock, self._own_clock, self._behind_s = CopiedClock(), OwnClock(), 0.0
        self._pushes = pushes
        self._home_link = HomeLink(number, layout, link, self._pushes, is_primary=is_primary)
        self.server = make_server(replace(layout, lost=set()), self._home_link, self._clock)
        self.server.is_copy = not is_primary
        self.server.n_copies = 1 if follower is None else 2
        self._log: Log[Entry] = Log(self._pushes, has_follower=follower is not None)
        self._between_copies: dict[int, Callable[[Delivery], None]] = {
            CopyOption.FOLLOW: self._follow,
            CopyOption.PUSH: self._follow,
            CopyOption.DONE: self._on_done,
            CopyOption.PIECE: self._load,
            CopyOption.LOADED: self._on_loaded,
            CopyOption.DROP: self._on_drop,
        }
        if is_primary:
            self._pushes.lead(follower)
        elif is_whole:
            self._pushes.follow(layout.rank_of(number))

    @property
    def is_primary(self) -> bool:
        return self._home_link.is_primary

    @property
    def is_over(self) -> bool:
        return self.is_whole and self.server.is_over and self._log.is_quiet

    @property
    def lacks_follower(self) -> bool:
        return self.is_primary and self.follower is None

    # --- the primary ----------------------------------------------------------------------------
    def on_frame(self, delivery: Delivery) -> None:
        """Take a frame for this home: a request, or a message of a home; of the other copy."""
        header = delivery.header
        if header.kind == FrameKind.RECORD and header.option in self._between_copies:
            self._between_copies[header.option](delivery)
        elif self.is_primary:
            self._take(delivery)
        self._settle()

    def _settle(self) -> None:
        """Let C++ take pushes, or not, until this copy has a frame again."""
        is_kept = bool(len(self._log)) or self._sending is not None
        self._pushes.wait_for_python(is_kept=is_kept)

    def _take(self, delivery: Delivery) -> None:
        header = delivery.header
        if header.kind in (FrameKind.ORDER, FrameKind.REPLY):  # of a home, wherever it runs
            delivery = Delivery(header.origin, header, delivery.meta, delivery.body)
        if _comes_once(header) and not is_read(header):
            came = self._home_link.answers.came(delivery.source, header.sequence)
            if came == Came.ANSWERED:
                self._home_link.answer_again(delivery.source, header.sequence)
            if came != Came.FIRST:
                return
        self._enter(self._entry(delivery))

    def _enter(self, entry: Entry) -> None:
        """Carry out a frame, if it changes something on both copies; or keep it."""
        if self._sending is not None and not self._sending.has_sent_all:
            self._sending.take(entry)
        elif is_read(entry.delivery.header):
            if self._log.add_read(entry):
                self._do(entry)
        elif not self._log.has_follower:
            self._do(entry)
        else:
            assert self.follower is not None
            send_record(self._link, self.number, self.follower, self._log.add(entry), entry)
            self._settle()

    def say(self, option: CopyOption, clock: int = 0, meta: bytes = b"") -> None:
        """Tell both copies something that no frame says."""
        header = FrameHeader(FrameKind.RECORD, option=option, clock=clock)
        address = self._layout.servers[self.number]
        self._enter(self._entry(Delivery(address, header, meta, NO_BODY)))

    def look(self) -> None:
        self.server.store.settle()
        is_free = self.is_primary and not len(self._log) and self._sending is None
        if is_free and self.server.core.awaits_time:
            self.say(CopyOption.TIME)

    def _entry(self, delivery: Delivery) -> Entry:
        own = self._own_clock
        return Entry(delivery, own.monotonic() - self._behind_s, own.time())

    def _carry_out(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._do(entry)

    def _on_done(self, delivery: Delivery) -> None:
        """Carry out what the follower has; if that went otherwise there, do without it."""
        report = delivery.header
        if self._sending is not None:  # of a copy that was dropped
            return
        self._pushes.complete(report.sequence)
        self._carry_out(self._log.done(report.sequence))
        if self.follower is None or report.place in (0, self._home_link.outcome):  # 0: of C++
            return
        _log.warning(
            "ps: the copy of server %d on rank %d has come to differ: one of the two could not "
            "carry out a request, for want of memory perhaps. That copy is made anew",
            self.number, self.follower,
        )  # fmt: skip
        send_drop(self._link, self.number, self.follower)
        self.lose_follower()

    def lose_follower(self) -> None:
        """Go on alone: the other copy's process died."""
        behind = [] if self._sending is None else self._sending.take_behind()
        self.follower = self._sending = None
        self.server.n_copies = 1
        self._pushes.complete(self._pushes.last)
        self._pushes.lead(None)
        self._carry_out(self._log.lose_follower())
        self._carry_out(behind)
        self._settle()

    # --- a new follower -------------------------------------------------------------------------
    def seek_follower(self, live: Iterable[int]) -> None:
        """Make a copy in another process, if there is none; of these ranks in the first that can.

        It begins at a moment at which nothing is under way but requests that wait.
        """
        if not self.lacks_follower or self.server.is_over:
            return
        rank = next((each for each in live if each not in self._refused), None)
        if rank is None or not may_be_copied(self.server, self._home_link):
            return
        self.follower = rank
        self._home_link.outcome = 0  # as of the new copy
        self._sending = SendWholeCopy(
            self.number, rank, self.server, self._home_link, clock=self._clock, link=self._link,
            do=self._do,
        )  # fmt: skip
        self._settle()
        self._send_pieces()

    def _send_pieces(self) -> None:
        assert self._sending is not None
        try:
            self._sending.send()
        except MemoryError as error:
            self._give_up(f"no memory to send it: {error}")
            return
        if self._sending.has_sent_all and not self._log.has_follower:
            self._log.gain_follower()
            for entry in self._sending.take_behind():
                self._enter(entry)

    def _on_loaded(self, delivery: Delivery) -> None:
        if self._sending is None or delivery.source != self.follower:
            return
        if delivery.meta:
            self._give_up(delivery.meta.decode())
        elif delivery.header.clock:
            self._sending, self.server.n_copies = None, 2
            self.on_copied()
            self._pushes.lead(self.follower)
            _log.warning(
                "ps: of server %d there are two copies again", self.number,
                extra={"event": "recovery"},
            )  # fmt: skip
        else:
            self._sending.note_loaded(delivery.header.sequence)
            self._send_pieces()

    def _give_up(self, why: str) -> None:
        assert self.follower is not None
        _log.warning(
            "ps: of server %d no copy can be made on rank %d: %s", self.number, self.follower, why
        )
        self._refused.add(self.follower)
        send_drop(self._link, self.number, self.follower)
        self.lose_follower()

    def _load(self, delivery: Delivery) -> None:
        """Take pieces of what the primary has."""
        if self.why_not:
            return
        self.why_not = take_pieces(
            delivery, self.server, self._home_link, clock=self._clock, link=self._link
        )
        if delivery.header.clock and not self.why_not:
            self.is_whole = True
            self._pushes.follow(delivery.source)

    # --- the follower ---------------------------------------------------------------------------
    def _follow(self, record: Delivery) -> None:
        if record.header.option == CopyOption.PUSH:
            self._pushes.repeat(record.meta, record.body)
            send_report(self._link, self.number, record, self._home_link.outcome)
            return
        entry = entry_of(self._link, record)
        source, header = entry.delivery.source, entry.delivery.header
        if _comes_once(header):
            self._home_link.answers.came(source, header.sequence)
        self._do(entry)
        send_report(self._link, self.number, record, self._home_link.outcome)

    def _on_drop(self, delivery: Delivery) -> None:
        del delivery
        self.why_not = "the primary has given it up"

    def promote(self) -> None:
        """Be the primary from now on: its process died."""
        self._home_link.is_primary = True
        self._pushes.lead(None)
        self._behind_s = self._own_clock.monotonic() - self._clock.monotonic_s
        self.server.is_copy = False

    def order_again(self, home: int) -> None:
        """Send a home that goes on, here or elsewhere, again what it has not answered."""
        if self.is_primary:
            before = self._home_link.outcome
            self.server.orders.again(home)
            self._home_link.outcome = before  # the other copy does not send it again

    def drop(self) -> None:
        self._pushes.drop()

    # --- both -----------------------------------------------------------------------------------
    def _do(self, entry: Entry) -> None:
        delivery, header, link = entry.delivery, entry.delivery.header, self._home_link
        self._clock.monotonic_s = max(self._clock.monotonic_s, entry.at_s)
        self._clock.time_s = entry.time_s
        if header.kind != FrameKind.RECORD:
            self.server.on_request(delivery)
            if header.kind == FrameKind.FILES and header.option == FilesOption.RESTORE:
                link.note_outcome(self.server.store.has_restored)
        elif header.option == CopyOption.DIED and header.clock in self._layout.servers:
            self.server.on_process_death(header.clock)
        elif header.option == CopyOption.DIED:
            link.answers.forget(header.clock)
            self.server.on_death(header.clock)
        elif header.option == CopyOption.LOST:
            self.server.on_loss(header.clock)
        elif header.option == CopyOption.TIME:
            self.server.let_time_pass()
        elif header.option == CopyOption.PLACES:
            self.n_places_said = max(0, self.n_places_said - 1)
            self.server.change_places(None, json.loads(delivery.meta))
        else:
            self.server.job = delivery.meta.decode()


def _comes_once(header: FrameHeader) -> bool:
    """Return True for a request that has one reply, also if it comes again."""
    return bool(header.sequence) and header.kind not in (FrameKind.RECORD, FrameKind.REPLY)
