"""Hosts and their places for ranks, as command lines, host files and schedulers name them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from ringcomm.errors import ConfigError


@dataclass(frozen=True)
class Host:
    """A host, and the number of ranks that it has places for."""

    name: str
    places: int

    def __str__(self) -> str:
        return f"{self.name}:{self.places}"


def places_of(hosts: Iterable[Host]) -> int:
    return sum(host.places for host in hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of "h1:4,h2:2"; a host without a number has one place each time it is named.

    "gpu[01-03,7]:4" are four hosts of 4 places each. Raises ConfigError for anything else.
    """
    items = re.split(r",(?![^\[]*\])", text)  # not those in brackets
    return _counted(host for item in items for host in _hosts(item, "-H"))


def parse_host_file(text: str) -> tuple[Host, ...]:
    """Return the hosts of a file with a line per host: "h1 slots=4", "h1:4" or "h1".

    A host may have several lines, as in PBS's $PBS_NODEFILE, which has one per place. # begins a
    comment; names may be ranges, as for parse_hosts(). Raises ConfigError for anything else, and if
    there is no host.
    """
    lines = text.removeprefix("\ufeff").splitlines()  # the mark with which Windows begins a text
    items = filter(None, (line.partition("#")[0].strip() for line in lines))
    hosts = _counted(host for item in items for host in _hosts(item, "the host file"))
    if not hosts:
        raise ConfigError("the host file names no host; it needs lines such as `node1 slots=4`")
    return hosts


def slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the Slurm allocation in `environ`; () outside of one.

    Raises ConfigError if Slurm's variables contradict each other.
    """
    names = list(expand_names(environ.get("SLURM_JOB_NODELIST", "")))
    if not names or "SLURM_JOB_ID" not in environ:
        return ()
    text = environ.get("SLURM_TASKS_PER_NODE", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    places = list(_repeated(text))
    if len(places) != len(names):
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE is {text!r}, for {len(places)} hosts, and SLURM_JOB_NODELIST "
            f"names {len(names)}; name the hosts by -H"
        )
    return tuple(map(Host, names, places))


def expand_names(text: str) -> Iterator[str]:
    """Yield the names of a Slurm list of hosts: "gpu[01-03,7],login" has five."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        yield from _expand(item)


def _expand(item: str) -> Iterator[str]:
    match = re.search(r"\[([^\]]*)\]", item)
    if match is None:
        yield item
        return
    for part in match[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield from _expand(
                f"{item[: match.start()]}{number:0{len(first)}d}{item[match.end() :]}"
            )


def _repeated(text: str) -> Iterator[int]:
    """Yield the numbers of "4(x2),3", which are 4, 4, 3."""
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        yield from [int(count)] * int(times or 1)


_RANGES = r"\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\]"
_HOSTS = re.compile(
    rf"((?:[^\s:=,\[\]]|{_RANGES})+)"
    r"(?:\s*:\s*(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?",
    re.IGNORECASE,
)


def _hosts(text: str, where: str) -> list[Host]:
    match = _HOSTS.fullmatch(text.strip())
    names = list(expand_names(match[1])) if match else []  # none of a range such as [3-1]
    places = int(match[2] or match[3] or 1) if match else 0
    if not names or places < 1:
        raise ConfigError(
            f"{where} has {text.strip()!r}, which is no host and number of places, as in h1:4 or "
            "gpu[01-04]:2"
        )
    return [Host(name, places) for name in names]


def _counted(hosts: Iterable[Host]) -> tuple[Host, ...]:
    places: dict[str, int] = {}
    for host in hosts:
        places[host.name] = places.get(host.name, 0) + host.places
    return tuple(Host(name, count) for name, count in places.items())
