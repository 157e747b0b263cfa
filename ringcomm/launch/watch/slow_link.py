"""Names the host whose link is slow, by what the hosts' kernels count of their connections. Pure.

All hosts wait for a slow link, for a ring passes everything through it. But while bytes are under
way, those through it arrive more slowly, or later, than those between the other hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Final

_LEAST_BYTES: Final = 1_000_000  # from which a rate is known
_RATE_RATIO: Final = 2.0
_TIME_RATIO: Final = 4.0
_LEAST_TIME_S: Final = 0.005

Pair = tuple[str, str]  # from this host, or address, to that one


@dataclass(frozen=True)
class Traffic:
    """Bytes sent from one host to another, and the time that they took.

    Attributes:
        nbytes: that have arrived.
        busy_us: time in which bytes were under way and the receiver had room for more.
        rtt_us: time of a message there and back, lately; of several connections, the shortest.
    """

    nbytes: int
    busy_us: int
    rtt_us: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.nbytes + other.nbytes,
            self.busy_us + other.busy_us,
            min(self.rtt_us, other.rtt_us),
        )

    def since(self, before: Traffic) -> Traffic:
        return Traffic(self.nbytes - before.nbytes, self.busy_us - before.busy_us, self.rtt_us)


@dataclass(frozen=True)
class SlowLink:
    """A host that is slow to reach and to hear from.

    Attributes:
        host: its name.
        what: the figures of its link and of the others, in words.
    """

    host: str
    what: str

    def __str__(self) -> str:
        return f"the link of host {self.host} is slow: {self.what}"


def slow_link(traffic: Mapping[Pair, Traffic]) -> SlowLink | None:
    """Return the host whose link is slow, or None; it takes three hosts to compare.

    Args:
        traffic: (from host, to host) -> what was sent in the last seconds.
    """
    rates = {
        pair: each.nbytes / each.busy_us
        for pair, each in traffic.items()
        if each.nbytes >= _LEAST_BYTES and each.busy_us > 0
    }
    for host in sorted({host for pair in traffic for host in pair}):
        own, others = _split(rates, host)
        if _RATE_RATIO * max(own, default=0.0) < min(others, default=0.0) and own:
            what = f"{max(own):.0f} MB/s, between the others {median(others):.0f} MB/s"
            return SlowLink(host, what)
    times = {pair: each.rtt_us / 1e6 for pair, each in traffic.items()}
    for host in sorted({host for pair in traffic for host in pair}):
        own, others = _split(times, host)
        if not own or not others:
            continue
        most = max(others)
        if min(own) > max(_TIME_RATIO * most, most + _LEAST_TIME_S):
            what = f"{min(own) * 1e3:.1f} ms there and back, between the others {most * 1e3:.1f} ms"
            return SlowLink(host, what)
    return None


def _split(values: Mapping[Pair, float], host: str) -> tuple[list[float], list[float]]:
    own = [value for pair, value in values.items() if host in pair]
    return own, [value for pair, value in values.items() if host not in pair]
