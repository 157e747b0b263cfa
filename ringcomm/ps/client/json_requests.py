"""Requests to servers about no table in particular; most of them carry JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ringcomm.ps.client.request import NO_BODY, Request
from ringcomm.ps.protocol.frame_meta import packed_json
from ringcomm.ps.protocol.frames import FilesOption, FrameKind, ServerOption

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.client.future import Future
    from ringcomm.ps.protocol.link import Delivery

R = TypeVar("R")


class Asker(Protocol):
    """The client of this rank."""

    @property
    def servers(self) -> tuple[int, ...]: ...

    def call_one(self, label: str, request: Request, read: Callable[[Delivery], R]) -> Future[R]:
        """Send a request; return a future of read(reply)."""

    def gather(
        self, label: str, requests: Sequence[Request], read: Callable[[Delivery], R]
    ) -> Future[list[R]]:
        """Send requests; return a future of read(reply) of each, in their order."""


def ask_servers(
    client: Asker,
    label: str,
    kind: FrameKind,
    servers: Sequence[int],
    read: Callable[[Delivery], R],
    *,
    clock: int = 0,
    option: int = 0,
    meta: bytes = b"",
) -> Future[list[R]]:
    """Send a request to each server; return a future of read(reply) of each, in their order."""
    requests = [
        Request(kind, server=server, clock=clock, option=option, meta=meta) for server in servers
    ]
    return client.gather(label, requests, read)


def ask_json(
    client: Asker,
    option: ServerOption | FilesOption,
    question: Any,
    servers: Sequence[int] | None = None,
) -> Future[list[Any]]:
    """Send JSON to servers, to all if not given; return a future of the JSON that they answer."""
    servers = client.servers if servers is None else servers
    kind = FrameKind.FILES if isinstance(option, FilesOption) else FrameKind.SERVER
    meta, label = packed_json(question), option.name.lower()
    return ask_servers(client, label, kind, servers, json_of, option=option, meta=meta)


class Commander(Asker, Protocol):
    @property
    def leader(self) -> int: ...
    @property
    def n_losses(self) -> int:
        """How many servers were lost, as far as this rank knows."""


def request_command(
    client: Commander, *, needs_tables: bool, meta: bytes = b"", body: Bytes = NO_BODY
) -> Request:
    """Return a request for a command; the content is in one of meta and body.

    It says how many losses this rank knows: if the leader knows of one more, a command about tables
    is void, as it is where the leader hears of the loss next.
    """
    return Request(
        FrameKind.ASK, server=client.leader, option=int(needs_tables), epoch=client.n_losses,
        meta=meta, body=body,
    )  # fmt: skip


def ask_leader(
    client: Commander, label: str, command: str, *, needs_tables: bool = False, **more: Any
) -> Future[Any]:
    """Ask for a command, see ringcomm.ps.control.commands; return a future of its result.

    needs_tables: not between the loss of a server and ps.recover().
    """
    meta = packed_json({"command": command, **more})
    request = request_command(client, needs_tables=needs_tables, meta=meta)
    return client.call_one(label, request, _content_of)


def json_of(reply: Delivery) -> Any:
    return json.loads(reply.body.tobytes() if reply.body.nbytes else reply.meta)


def _content_of(reply: Delivery) -> Any:
    return json_of(reply) if reply.meta or reply.body.nbytes else None


def ignore(_reply: Delivery) -> None: ...
