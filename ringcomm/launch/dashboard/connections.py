"""Lets nobody lock out who has the token: connections without it make way for new ones."""

from __future__ import annotations

import asyncio
import resource
from functools import partial
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST: Final = 512  # connections at a time; a browser opens 6
PATIENCE_S: Final = 10.0  # time in which a connection shows the token, or ends
_Client = tuple[str, int]


class Door:
    """The open connections. All of it runs in the thread of the event loop.

    uvicorn's limit_concurrency counts idle connections and closes none, so that it would lock out
    the user; and it has no deadline for headers.
    """

    def __init__(self, most: int, patience_s: float = PATIENCE_S) -> None:
        self._most, self._patience_s = most, patience_s
        self._strangers: dict[_Client, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}
        self._known: set[_Client] = set()

    def enter(self, client: _Client, transport: asyncio.Transport) -> None:
        """Take a new connection. If there are too many, the oldest one without the token ends."""
        if len(self._known) >= self._most:
            transport.abort()
            return
        if len(self._known) + len(self._strangers) >= self._most:
            self._break_off(next(iter(self._strangers)))
        timer = asyncio.get_running_loop().call_later(self._patience_s, self._break_off, client)
        self._strangers[client] = transport, timer

    def has_shown_token(self, client: _Client) -> None:
        """Let a connection stay until it ends."""
        if client in self._strangers:
            self._strangers.pop(client)[1].cancel()
            self._known.add(client)

    def leave(self, client: _Client) -> None:
        self._known.discard(client)
        if client in self._strangers:
            self._strangers.pop(client)[1].cancel()

    def _break_off(self, client: _Client) -> None:
        transport, timer = self._strangers.pop(client)
        timer.cancel()
        transport.abort()


def most_connections() -> int:
    """Return how many may be open: half as many as this process may open files, 512 at most."""
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if n_files == resource.RLIM_INFINITY else max(1, min(_MOST, n_files // 2))


class Connection(H11Protocol):
    def __init__(self, *arguments: Any, door: Door, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._door = door

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        if self.client is None:  # it has gone
            transport.abort()
        else:
            self._door.enter(self.client, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.client is not None:
            self._door.leave(self.client)
        super().connection_lost(exc)


def of_door(door: Door) -> Any:
    """Return what uvicorn calls for each connection: its option `http`."""
    return partial(Connection, door=door)
