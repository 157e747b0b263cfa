"""Hosts and their places for ranks, as command lines, host files and schedulers name them. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Final

from ringcomm.errors import ConfigError

_MOST: Final = 100_000  # names in a list; "h[1-999999999]" would take all memory


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
    return _counted(host for item in _COMMA.split(text) for host in _hosts(item, "-H"))


def parse_host_file(text: str, where: str = "the host file") -> tuple[Host, ...]:
    """Return the hosts of a file with a line per host: "h1 slots=4", "h1:4" or "h1".

    A host may have several lines, as in PBS's $PBS_NODEFILE, which has one per place. # begins a
    comment; names may be ranges, as for parse_hosts(). Raises ConfigError for anything else, and if
    there is no host; its text begins with `where`.
    """
    lines = text.removeprefix("\ufeff").splitlines()  # the mark with which Windows begins a text
    items = filter(None, (line.partition("#")[0].strip() for line in lines))
    hosts = _counted(host for item in items for host in _hosts(item, where))
    if not hosts:
        raise ConfigError(f"{where} names no host; it needs lines such as `node1 slots=4`")
    return hosts


def slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """Return the hosts of the Slurm allocation in `environ`; () outside of one.

    Raises ConfigError if Slurm's variables contradict each other, or are no lists.
    """
    listed = environ.get("SLURM_JOB_NODELIST", "")
    if not listed or "SLURM_JOB_ID" not in environ:
        return ()
    names = expand_names(listed)
    if not names:
        raise ConfigError(
            f"SLURM_JOB_NODELIST is {listed!r}, which is no list of hosts; name them by -H"
        )
    text = environ.get("SLURM_TASKS_PER_NODE", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    places = list(islice(_repeated(text), _MOST))
    if len(places) != len(names):
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE is {text!r}, for {len(places)} hosts, and SLURM_JOB_NODELIST "
            f"names {len(names)}; name the hosts by -H"
        )
    return tuple(map(Host, names, places))


def expand_names(text: str) -> list[str]:
    """Return the names of a Slurm list of hosts: "gpu[01-03,7],login" has five; [] if it is none.

    Raises ConfigError if it has more than 100,000.
    """
    items = _COMMA.split(text)
    if not all(_NAMES.fullmatch(item) and item.isprintable() for item in items):
        return []
    counts = [
        math.prod(sum(map(len, _numbers(each))) for each in _BRACKETS.findall(item))
        for item in items
    ]
    if sum(counts) > _MOST:
        raise ConfigError(f"{text} has more than {_MOST} hosts")
    return [name for item in items for name in _expand(item)] if all(counts) else []


def _expand(item: str) -> Iterator[str]:
    match = _BRACKETS.search(item)
    if match is None:
        yield item
        return
    for numbers, part in zip(_numbers(match[1]), match[1].split(","), strict=True):
        width = len(part.partition("-")[0])
        for number in numbers:
            yield from _expand(f"{item[: match.start()]}{number:0{width}d}{item[match.end() :]}")


def _numbers(text: str) -> list[range]:
    """Return [range(1, 4), range(7, 8)] for "01-03,7"."""
    ends = (part.partition("-") for part in text.split(","))
    return [range(int(first), int(last or first) + 1) for first, _, last in ends]


def _repeated(text: str) -> Iterator[int]:
    """Yield the numbers of "4(x2),3", which are 4, 4, 3."""
    for count, times in re.findall(rf"({_NUMBER})(?:\(x({_NUMBER})\))?", text):
        yield from repeat(int(count), int(times or 1))


_COMMA = re.compile(r",(?![^\[]*\])")  # not one in brackets
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_NUMBER = r"\d{1,9}"
_RANGES = rf"\[{_NUMBER}(?:-{_NUMBER})?(?:,{_NUMBER}(?:-{_NUMBER})?)*\]"
_NAMES = re.compile(rf"(?!-)(?:[^\s:=,\[\]]|{_RANGES})+")  # "-F..." would be an option of ssh
_HOSTS = re.compile(
    rf"({_NAMES.pattern})(?:\s*:\s*({_NUMBER})|\s+slots\s*=\s*({_NUMBER}))?"
    r"(?:\s+max[-_]slots\s*=\s*\d+)?",
    re.IGNORECASE,
)


def _hosts(text: str, where: str) -> list[Host]:
    match = _HOSTS.fullmatch(text.strip())
    names = expand_names(match[1]) if match else []  # none of a range such as [3-1]
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
