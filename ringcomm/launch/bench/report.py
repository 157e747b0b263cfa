"""What a run found, as rows and as JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from ringcomm.errors import ConfigError

_FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One engine, one collective, one size, one form.

    Attributes:
        collective: allreduce, ...; of the memcpy line: that of the lines beside it.
        op: sum, ...; "" where nothing is reduced.
        dtype: float32, ...
        nbytes: of the whole buffer, as nccl-tests count it.
        count: its elements.
        engine: ringcomm, native, gloo or memcpy.
        buffers: "registered" or "private".
        in_place: the result replaced the argument.
        wrong: wrong elements of all ranks, before and after timing.
        time_us: median over batches of a batch's mean call, by the slowest rank; None: not timed,
            because the result was wrong. So are the other times.
        call_p50_us: median over single calls, by the slowest rank of each.
        p99_us: 99th percentile of the same; the longest, if there were fewer than 100.
        calls: how many single calls.
        algbw_gbps: nbytes / time, GB/s (1e9).
        busbw_gbps: the same, comparable with the hardware's whatever the number of ranks.
        wire_share: least bytes that cross a host's link / time / the measured link; None on one
            host.
        algorithm: what ringcomm chose.
    """

    collective: str
    op: str
    dtype: str
    nbytes: int
    count: int
    engine: str
    buffers: str
    in_place: bool
    wrong: int
    time_us: float | None = None
    call_p50_us: float | None = None
    p99_us: float | None = None
    calls: int = 0
    algbw_gbps: float | None = None
    busbw_gbps: float | None = None
    wire_share: float | None = None
    algorithm: str = ""

    @property
    def label(self) -> str:
        """What the table and the picture call its engine."""
        return f"{self.engine} reg" if self.buffers == "registered" else self.engine


@dataclass(frozen=True)
class Report:
    """A run of `ringcomm bench`.

    Attributes:
        version: of ringcomm.
        size: ranks.
        hosts: hosts.
        cores: cores that the ranks of rank 0's host may use; 0 on the other ranks.
        load: load average of rank 0's host over a minute, before the run.
        mpi: the MPI library.
        is_mpi_default: MPI ran with its own settings, alone.
        mode: sync, async or named.
        settings: variables of the environment that were set for ringcomm or MPI.
        link_gbps: measured between hosts, GB/s each way; None on one host.
        rows: what was found.
    """

    version: str
    size: int
    hosts: int
    cores: int
    load: float
    mpi: str
    is_mpi_default: bool
    mode: str
    settings: dict[str, str]
    link_gbps: float | None
    rows: list[Row]

    @property
    def wrong(self) -> int:
        """Wrong elements of all rows."""
        return sum(row.wrong for row in self.rows)


def to_json(report: Report) -> str:
    """Return the report as JSON."""
    return json.dumps({"ringcomm_bench": _FORMAT, **dataclasses.asdict(report)}, indent=1)


def from_json(text: str, *, source: str) -> Report:
    """Return the report that to_json() wrote.

    Raises:
        ConfigError: it is something else; `source` says in the text what.
    """
    try:
        found: dict[str, Any] = json.loads(text)
        is_ours = found.pop("ringcomm_bench") == _FORMAT
        if is_ours:
            rows = [Row(**row) for row in found.pop("rows")]
            return Report(**found, rows=rows)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{source} is no report of `ringcomm bench --json`: {error}") from error
    raise ConfigError(f"{source} was written by another version of `ringcomm bench --json`")
