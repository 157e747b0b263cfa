"""What servers have measured."""

from __future__ import annotations

import json
from typing import Any

from ringcomm.ps.client import Ask
from ringcomm.ps.frames import Kind
from ringcomm.ps.future import Future
from ringcomm.ps.job import session
from ringcomm.ps.link import Delivery


def stats() -> list[dict[str, Any]]:
    """Return what each server has done so far, by server.

    Returns:
        For each: "requests", "seconds" since it began, "waiting" (pulls that wait for a round or
        for a slow worker), and "tables": name -> partition -> pushes, pulls, nbytes, late, apply_s,
        and staleness, a histogram: updates that an async push had missed -> how many did.
    """
    client = session().client
    n = client.n_servers
    told: list[dict[str, Any]] = [{} for _ in range(n)]

    def note(server: int, reply: Delivery) -> None:
        told[server] = json.loads(reply.body.tobytes())

    future = Future(client, "stats", n, lambda: told, client.timestamp())
    asks = [
        Ask(Kind.STATS, server=server, on_reply=lambda reply, s=server: note(s, reply))  # type: ignore[misc]
        for server in range(n)
    ]
    client.ask(asks, future)
    return future.wait()
