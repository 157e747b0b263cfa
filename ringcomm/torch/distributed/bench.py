"""`ringcomm bench ddp`: torch.distributed over ringcomm and over gloo, in the same processes.

all_reduce by size, what a call costs in Python, and a step of DDP: with its own buckets, with
node_hook, over gloo, and without communication. All take turns.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ringcomm._version import __version__
from ringcomm.engine.api.collectives import allgather_object, barrier
from ringcomm.engine.api.world import rank, shutdown, size
from ringcomm.errors import ConfigError
from ringcomm.torch.bench import (
    ALONE,
    TOLERANCE,
    Line,
    Variant,
    at_least,
    difference_after_one_step,
    seeded,
    sgd,
    summary,
    times_s,
)
from ringcomm.torch.distributed.compat import c10d
from ringcomm.torch.distributed.entry import init_process_group
from ringcomm.torch.distributed.hook import node_hook
from ringcomm.torch.models import WORKLOADS, Workload

_OWN, _HOOK, _GLOO = "DDP, ringcomm", "DDP, node_hook", "DDP, gloo"
_SIZES = [1 << shift for shift in range(10, 27, 2)]  # 1 KiB to 64 MiB
_BATCH_S = 2e-3  # of calls back to back; a single one where it takes longer


@dataclass(frozen=True)
class Row:
    """all_reduce of one size, in place, float32: medians over batches of the slowest rank's mean.

    Attributes:
        nbytes: of the tensor.
        ours_us: over ringcomm.
        gloo_us: over gloo.
    """

    nbytes: int
    ours_us: float
    gloo_us: float

    @property
    def factor(self) -> float:
        """How many times faster ours is."""
        return self.gloo_us / self.ours_us


@dataclass(frozen=True)
class Outcome:
    """What the command found.

    Attributes:
        version: of ringcomm.
        size: ranks.
        rows: all_reduce by size.
        python_us: what a call takes apart from the communication, by backend.
        model: mlp or transformer.
        difference: of gradients to those over gloo after one step, / the largest gradient.
        is_equal: that is within float32's rounding.
        lines: of the ways to train; none if not equal.
        ratios: exposed communication / that of DDP over gloo, by way.
    """

    version: str
    size: int
    rows: list[Row]
    python_us: dict[str, float]
    model: str
    difference: float
    is_equal: bool
    lines: list[Line]
    ratios: dict[str, float | None]


def main(argv: Sequence[str]) -> int:
    """Measure what `argv` says; return 1 if a gradient or a sum is wrong, else 0. Collective.

    Raises:
        ConfigError: there is one rank, or this torch has no gloo.
    """
    args = _parser().parse_args(argv)
    if not c10d.is_gloo_available():
        raise ConfigError("this torch was built without gloo")
    init_process_group()
    if size() == 1:
        raise ConfigError("1 rank, and an average takes two: mpirun -np 2 ringcomm bench ddp")
    torch.set_num_threads(args.threads)
    gloo = c10d.new_group(backend="gloo")
    outcome = _measure(args, gloo)
    if rank() == 0:
        print(*_text(outcome), sep="\n", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(dataclasses.asdict(outcome), indent=1) + "\n")
    c10d.destroy_process_group()
    shutdown()
    return 0 if outcome.is_equal else 1


def _measure(args: argparse.Namespace, gloo: Any) -> Outcome:
    workload = WORKLOADS[args.model]
    rows = [_row(nbytes, args.rounds, gloo) for nbytes in _SIZES if nbytes <= args.largest]
    python_us = _python_us()
    torch.manual_seed(1 + rank())
    batch = workload.batch(args.batch or workload.samples)
    variants = _variants(workload, gloo)
    difference = difference_after_one_step(variants, workload, batch)
    is_equal = difference <= TOLERANCE
    lines = summary(times_s(variants, workload, batch, args)) if is_equal else []
    exposed = {line.name: line.exposed_ms for line in lines}
    theirs = exposed.get(_GLOO, 0.0)
    ratios = {n: exposed[n] / theirs if theirs > 0 else None for n in (_OWN, _HOOK) if n in exposed}
    return Outcome(
        __version__, size(), rows, python_us, args.model, difference, is_equal, lines, ratios
    )


# --- all_reduce -----------------------------------------------------------------------------------
def _row(nbytes: int, rounds: int, gloo: Any) -> Row:
    x = torch.zeros(nbytes // 4)
    ways = {"ours": c10d.group.WORLD, "gloo": gloo}
    calls = {name: functools.partial(c10d.all_reduce, x, group=g) for name, g in ways.items()}
    counts = {name: _count(call) for name, call in calls.items()}
    mine: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in calls if number % 2 == 0 else reversed(calls):
            barrier()
            calls[name]()  # takes the skew with which ranks leave the barrier
            mine[name].append(_mean_s(calls[name], counts[name]))
    medians = {name: _slowest_median(mine[name]) * 1e6 for name in mine}
    return Row(nbytes, medians["ours"], medians["gloo"])


def _count(call: Callable[[], object]) -> int:
    """Return how many calls make a batch, the same on all ranks."""
    call()
    return max(1, min(200, int(_BATCH_S / max(allgather_object(_mean_s(call, 3))))))


def _mean_s(call: Callable[[], object], n: int) -> float:
    start = time.perf_counter()
    for _ in range(n):
        call()
    return (time.perf_counter() - start) / n


def _slowest_median(mine: list[float]) -> float:
    of_all: list[list[float]] = allgather_object(mine)
    found: float = statistics.median(map(max, zip(*of_all, strict=True)))
    return found


class _NoOperation:
    """Stands for the engine: what is left is the way to it."""

    def allreduce_(self, *_: object) -> bool:
        return True


def _python_us() -> dict[str, float]:
    """Return what a call takes apart from the communication, by backend.

    Over ringcomm the engine is left out; gloo has a group of one rank, and nobody to wait for.
    """
    found: dict[str, float] = {}
    x = torch.zeros(16)
    ours = c10d.new_group()
    ours.group.quick = _NoOperation()
    theirs = [c10d.new_group([r], backend="gloo") for r in range(size())][rank()]
    for backend, group in {"ringcomm": ours, "gloo": theirs}.items():
        call = functools.partial(c10d.all_reduce, x, group=group)
        _mean_s(call, 100)
        found[backend] = _slowest_median([_mean_s(call, 200) for _ in range(15)]) * 1e6
    return found


# --- a step of DDP --------------------------------------------------------------------------------
def _variants(workload: Workload, gloo: Any) -> list[Variant]:
    alone, own, hooked, theirs = (seeded(workload) for _ in range(4))
    ddp_hooked: Any = DistributedDataParallel(hooked)
    ddp_hooked.register_comm_hook(None, node_hook)
    models = {
        ALONE: alone,
        _OWN: DistributedDataParallel(own),
        _HOOK: ddp_hooked,
        _GLOO: DistributedDataParallel(theirs, process_group=gloo),
    }
    return [Variant(name, model, sgd(model)) for name, model in models.items()]


def _text(outcome: Outcome) -> list[str]:
    text = [
        f"# ringcomm bench ddp {outcome.version}: {outcome.size} ranks",
        f"{'all_reduce':>12}{'ringcomm':>12}{'gloo':>12}{'faster':>9}",
    ]
    for row in outcome.rows:
        name = f"{row.nbytes >> 10} KiB" if row.nbytes < 1 << 20 else f"{row.nbytes >> 20} MiB"
        text.append(f"{name:>12}{row.ours_us:>9.0f} us{row.gloo_us:>9.0f} us{row.factor:>8.1f}x")
    costs = ", ".join(f"{name} {us:.1f} us" for name, us in outcome.python_us.items())
    text.append(f"a call, without the communication: {costs}")
    text.append(
        f"# {outcome.model}: gradients and weights differ from gloo's by {outcome.difference:.1e}"
    )
    if not outcome.is_equal:
        return [*text, f"# WRONG: more than {TOLERANCE:g} of the largest gradient; not timed"]
    text.append(f"{'':<18}{'step p50':>12}{'exposed':>12}{'/ gloo':>9}")
    for line in outcome.lines:
        exposed = "" if line.name == ALONE else f"{line.exposed_ms:>9.2f} ms"
        ratio = outcome.ratios.get(line.name)
        text.append(
            f"{line.name:<18}{line.step_ms:>9.2f} ms{exposed}"
            + (f"{ratio:>9.2f}" if ratio is not None else "")
        )
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm bench ddp",
        description="Measure torch.distributed over ringcomm beside gloo, under mpirun: all_reduce "
        "by size, the cost of a call, and a step of DistributedDataParallel. The exit code is 1 if "
        "gradients differ.",
    )
    count = functools.partial(at_least, 1)
    parser.add_argument("--model", choices=list(WORKLOADS), default="mlp")
    parser.add_argument("--steps", type=count, default=30, help="to time, of each; default 30")
    parser.add_argument("--warmup", type=functools.partial(at_least, 0), default=5)
    parser.add_argument("--batch", type=count, help="samples per rank; default 32 or 8")
    parser.add_argument("--threads", type=count, default=1, help="of torch per rank; default 1")
    parser.add_argument("--rounds", type=count, default=15, help="of batches; default 15")
    parser.add_argument(
        "--largest", type=count, default=_SIZES[-1], metavar="BYTES", help="default 64 MiB"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, too")
    return parser
