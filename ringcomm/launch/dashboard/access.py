"""Decides who may read the dashboard, for each request, before anything else sees it. Pure."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

HEADER: Final = (
    "x-ringcomm"  # of requests that change something: a form of another site cannot set it
)
SAFE: Final = ("GET", "HEAD")


@dataclass(frozen=True)
class Gate:
    port: int
    token: str

    @property
    def cookie(self) -> str:
        """The name of the cookie. Browsers send cookies to all ports of a host."""
        return f"ringcomm-{self.port}"

    @property
    def hosts(self) -> tuple[str, ...]:
        """The values of the Host header that are ours. Others may be names of an attacker."""
        return tuple(f"{name}:{self.port}" for name in ("127.0.0.1", "localhost", "[::1]"))


@dataclass(frozen=True)
class Asked:
    """The parts of a request that decide access; "" for a missing one."""

    method: str
    host: str
    token: str = ""  # in the address
    cookie: str = ""
    origin: str = ""
    has_header: bool = False


def judge(gate: Gate, asked: Asked) -> int:
    """Return the status with which a request is answered.

    200: it may pass. 303: it has the token, and gets the cookie. 401: it has no valid secret. 403:
    it may come from another site. 421: it is for another host.
    """
    if asked.host not in gate.hosts:
        return 421
    if asked.token:
        return 303 if asked.method in SAFE and _equal(asked.token, gate.token) else 401
    if not _equal(asked.cookie, gate.token):
        return 401
    if asked.method in SAFE:
        return 200
    is_ours = asked.origin in [f"http://{host}" for host in gate.hosts] and asked.has_header
    return 200 if is_ours else 403


def _equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), secret.encode())
