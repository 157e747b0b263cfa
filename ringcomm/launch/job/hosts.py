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
    """Return the number of places of all these hosts."""
    return sum(host.places for host in hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Return the hosts of "h1:4,h2:2"; a host without a number has one place each time it is named.

    Raises ConfigError for anything else.
    """
    return _counted(_host(item, "-H") for item in text.split(","))


def parse_host_file(text: str) -> tuple[Host, ...]:
    """Return the hosts of a file with a line per host: "h1 slots=4", "h1:4" or "h1".

    A host may have several lines, as in PBS's $PBS_NODEFILE, which has one per place. # begins a
    comment. Raises ConfigError for anything else, and if there is no host.
    """
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    hosts = _counted(_host(line, "the host file") for line in lines if line)
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


_HOST = re.compile(
    r"([^\s:=,]+)(?:\s*:\s*(\d+)|\s+slots\s*=\s*(\d+))?(?:\s+max[-_]slots\s*=\s*\d+)?"
)


def _host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text.strip())
    places = int(match[2] or match[3] or 1) if match else 0
    if match is None or places < 1:
        raise ConfigError(
            f"{where} has {text.strip()!r}, which is no host and number of places, as in h1:4"
        )
    return Host(match[1], places)


def _counted(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Return each host once, with all its places, in the order of the first mention."""
    places: dict[str, int] = {}
    for host in hosts:
        places[host.name] = places.get(host.name, 0) + host.places
    return tuple(Host(name, count) for name, count in places.items())
