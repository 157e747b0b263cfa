"""Changes of a home, and how they get to the other copy: as records, each of which is a frame."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from ringcomm.ps.protocol.frames import (
    HEADER_NBYTES,
    CopyOption,
    FrameHeader,
    FrameKind,
    Where,
    header_of,
    packed,
)
from ringcomm.ps.protocol.link import Delivery
from ringcomm.ps.server.homes.home_link import NO_BODY

if TYPE_CHECKING:
    from ringcomm.ps.protocol.link import Link

AT: Final = struct.Struct("<Qdd")  # the rank that sent it, and the times at which it is done


class Entry:
    """A frame, and when it is carried out."""

    __slots__ = ("at_s", "delivery", "time_s")

    def __init__(self, delivery: Delivery, at_s: float, time_s: float) -> None:
        self.delivery, self.at_s, self.time_s = delivery, at_s, time_s


def send_record(link: Link, home: int, follower: int, index: int, entry: Entry) -> None:
    """Send a frame to the follower, or where its body is.

    Args:
        link: the wire of this rank.
        home: number of the home.
        follower: rank of the other copy.
        index: of the change. 0: it is carried out here without waiting for the follower's report,
            so its sender may write where the body was before the follower has read that.
        entry: the frame.
    """
    delivery = entry.delivery
    body, inner = delivery.body, delivery.header
    is_seen = inner.where == Where.SHARED and inner.kind != FrameKind.ORDER
    if is_seen and index and link.shares_memory(follower):
        body = NO_BODY
    else:
        body = body if index or inner.where != Where.SHARED else body.copy()
        inner = inner._replace(where=Where.NONE)
    at = AT.pack(delivery.source, entry.at_s, entry.time_s)
    header = FrameHeader(FrameKind.RECORD, home=home + 1, option=CopyOption.FOLLOW, sequence=index)
    link.send(follower, header, at + packed(inner) + delivery.meta, body)


def entry_of(link: Link, record: Delivery) -> Entry:
    source, at_s, time_s = AT.unpack_from(record.meta)
    inner = header_of(record.meta[AT.size :])
    meta, body = record.meta[AT.size + HEADER_NBYTES :], record.body
    if inner.where == Where.SHARED:
        body = link.view(source, inner.place, inner.n_body)
    return Entry(Delivery(source, inner, meta, body), at_s, time_s)


def send_report(link: Link, home: int, record: Delivery, outcome: int) -> None:
    """Tell the primary that all up to a record is done, and how that went."""
    if not record.header.sequence:  # it does not wait for that
        return
    header = FrameHeader(
        FrameKind.RECORD, home=home + 1, option=CopyOption.DONE, sequence=record.header.sequence,
        place=outcome,
    )  # fmt: skip
    link.send(record.source, header)


def send_drop(link: Link, home: int, follower: int) -> None:
    link.send(follower, FrameHeader(FrameKind.RECORD, home=home + 1, option=CopyOption.DROP))
