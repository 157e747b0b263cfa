"""Decides who may read the dashboard, for each request, before anything else sees it. Pure.

A browser sends cookies, and shows what it has cached, to all ports of a host. So the token is in no
cookie: the page keeps it and sends it as a header. And the dashboard has a host name of its own,
for which nobody has left a cached page, a cookie or a service worker in the browser before.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

SAFE: Final = ("GET", "HEAD")
OPEN: Final = (  # what a browser asks for before it has run the page: the same for everybody
    "/",
    "/static/app.js",
    "/static/draw.js",
    "/static/icon.svg",
    "/static/words.js",
    "/static/style.css",
    "/static/uPlot.iife.min.js",
    "/static/uPlot.min.css",
)


@dataclass(frozen=True)
class Gate:
    """The secrets of a dashboard.

    Attributes:
        label: first part of its host name, which nobody can guess before.
    """

    label: str
    port: int
    token: str

    @property
    def address(self) -> str:
        """What is opened in a browser, which keeps to itself what comes after the "#"."""
        return f"http://{self.hosts[0]}/#{self.token}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the Host header that are ours. Others may be names of an attacker."""
        names = (f"{self.label}.localhost", "127.0.0.1", "localhost", "[::1]")
        return tuple(f"{name}:{self.port}" for name in names)


@dataclass(frozen=True)
class Asked:
    """The parts of a request that decide access; "" for a missing one."""

    method: str
    path: str
    host: str
    authorization: str = ""
    origin: str = ""


def judge(gate: Gate, asked: Asked) -> int:
    """Return the status with which a request is answered.

    200: it may pass. 401: it lacks the token. 403: it may come from another site. 421: it is for
    another host.
    """
    if asked.host not in gate.hosts:
        return 421
    if asked.method in SAFE and asked.path in OPEN:
        return 200
    if not has_token(asked.authorization, gate.token):
        return 401
    if asked.method in SAFE and not asked.origin:
        return 200
    return 200 if asked.origin == f"http://{asked.host}" else 403


def has_token(authorization: str, token: str) -> bool:
    """Return whether the header `Authorization` has the token; in a time that tells nothing."""
    expected = f"Bearer {token}"
    return hmac.compare_digest(authorization.encode(errors="replace"), expected.encode())
