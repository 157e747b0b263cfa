"""`ringcomm bench optimizer`: a step of training with us, with DDP over gloo, and alone.

The three take turns in one process, on models of the same seed. What a step takes beyond one
without communication is the exposed communication: what backward() could not hide.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from ringcomm._version import __version__
from ringcomm.engine.api.collectives import allgather_object, barrier
from ringcomm.engine.api.world import init, rank, shutdown, size
from ringcomm.errors import ConfigError
from ringcomm.torch.gloo import start_gloo
from ringcomm.torch.models import WORKLOADS, Workload
from ringcomm.torch.optimizer import DistributedOptimizer

_SEED = 20
_LEARNING_RATE = 1e-3
TOLERANCE = 1e-4  # of the largest gradient: float32 sums in another order, and a product of n
ALONE, _OURS, _DDP = "no communication", "ringcomm", "DDP over gloo"


@dataclass(frozen=True)
class Line:
    """What was found of one variant.

    Attributes:
        name: of the variant.
        step_ms: median over rounds of the slowest rank's step.
        exposed_ms: median over rounds of this step less the round's step without communication.
    """

    name: str
    step_ms: float
    exposed_ms: float


@dataclass(frozen=True)
class Outcome:
    """What the command found.

    Attributes:
        version: of ringcomm.
        model: mlp or transformer.
        parameters: how many the model has.
        size: ranks.
        threads: of torch, per rank.
        batch: samples per rank.
        steps: of each variant.
        difference: of our gradients to DDP's after one step, / the largest gradient.
        is_equal: that is within float32's rounding.
        ratio: our exposed communication / DDP's.
        lines: of the variants; none if not equal.
    """

    version: str
    model: str
    parameters: int
    size: int
    threads: int
    batch: int
    steps: int
    difference: float
    is_equal: bool
    ratio: float | None
    lines: list[Line]


@dataclass(frozen=True)
class Variant:
    """A model, and how it is trained.

    Attributes:
        name: for the table.
        model: of the same weights in all variants.
        optimizer: its own.
    """

    name: str
    model: nn.Module
    optimizer: Optimizer

    def step(self, loss: Callable[[nn.Module, Tensor], Tensor], batch: Tensor) -> None:
        """Train on one batch."""
        self.optimizer.zero_grad()
        loss(self.model, batch).backward()  # type: ignore[no-untyped-call] # torch gives it none
        self.optimizer.step()


def main(argv: Sequence[str]) -> int:
    """Measure what `argv` says; return 1 if we and DDP disagree on the gradients, else 0.

    Collective.

    Raises:
        ConfigError: there is one rank, or this torch has no gloo.
    """
    args = _parser().parse_args(argv)
    init()
    if size() == 1:
        raise ConfigError("1 rank, and an average takes two: mpirun -np 2 ringcomm bench optimizer")
    torch.set_num_threads(args.threads)
    start_gloo()
    outcome = _compare(args)
    if rank() == 0:
        print(*_lines(outcome), sep="\n", flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(dataclasses.asdict(outcome), indent=1) + "\n")
    dist.destroy_process_group()
    shutdown()
    return 0 if outcome.is_equal else 1


def _compare(args: argparse.Namespace) -> Outcome:
    workload = WORKLOADS[args.model]
    torch.manual_seed(_SEED + 1 + rank())
    n = args.batch or workload.samples
    batch = workload.batch(n)
    variants = _variants(workload)
    difference = difference_after_one_step(variants, workload, batch)
    is_equal = difference <= TOLERANCE
    times = times_s(variants, workload, batch, args) if is_equal else {}
    lines = summary(times)
    return Outcome(
        version=__version__,
        model=args.model,
        parameters=sum(p.numel() for p in variants[0].model.parameters()),
        size=size(),
        threads=args.threads,
        batch=n,
        steps=args.steps,
        difference=difference,
        is_equal=is_equal,
        ratio=_ratio(lines),
        lines=lines,
    )


def _variants(workload: Workload) -> list[Variant]:
    alone, ours, theirs = (seeded(workload) for _ in range(3))
    wrapped = DistributedOptimizer(sgd(ours), ours.named_parameters())
    ddp = DistributedDataParallel(theirs)
    return [
        Variant(ALONE, alone, sgd(alone)),
        Variant(_OURS, ours, wrapped),
        Variant(_DDP, ddp, sgd(ddp)),
    ]


def seeded(workload: Workload) -> nn.Module:
    """Return a model of the same weights each time."""
    torch.manual_seed(_SEED)
    return workload.make()


def sgd(model: nn.Module) -> SGD:
    """Return the optimizer of all variants."""
    return SGD(model.parameters(), lr=_LEARNING_RATE)


# --- do they compute the same? ------------------------------------------------------------------
def difference_after_one_step(variants: list[Variant], workload: Workload, batch: Tensor) -> float:
    """Return the largest difference of gradients and weights to the last variant's, on any rank.

    The first variant does not communicate, and is not compared. In units of the largest gradient;
    weights in units of a step along it.
    """
    for variant in variants:
        variant.step(workload.loss, batch)
    theirs = list(variants[-1].model.parameters())
    mine = max(_difference(list(v.model.parameters()), theirs) for v in variants[1:-1])
    found = [each if math.isfinite(each) else math.inf for each in allgather_object(mine)]
    return max(found)


def _difference(ours: list[nn.Parameter], theirs: list[nn.Parameter]) -> float:
    pairs = list(zip(ours, theirs, strict=True))
    largest = max(_grad(q).abs().max().item() for _, q in pairs)
    gradients = max((_grad(p) - _grad(q)).abs().max().item() for p, q in pairs)
    # A weight of 1 moves by less than its own rounding: that is no difference of the step.
    weights = max(_beyond_rounding(p.detach(), q.detach()) for p, q in pairs)
    return max(gradients / largest, weights / (_LEARNING_RATE * largest))


def _grad(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def _beyond_rounding(p: Tensor, q: Tensor) -> float:
    rounding = torch.finfo(p.dtype).eps * torch.maximum(p.abs(), q.abs())
    return ((p - q).abs() - rounding).clamp(min=0).max().item()


# --- time ---------------------------------------------------------------------------------------
def times_s(
    variants: list[Variant], workload: Workload, batch: Tensor, args: argparse.Namespace
) -> dict[str, list[float]]:
    """Return the slowest rank's seconds of each step; after each variant the next one's turn."""
    mine: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(args.warmup + args.steps):
        # Back and forth: else a variant would always follow the same other one.
        for variant in variants if number % 2 == 0 else reversed(variants):
            barrier()
            start = time.perf_counter()
            variant.step(workload.loss, batch)
            mine[variant.name].append(time.perf_counter() - start)
    everyone = allgather_object(mine)
    return {
        name: [max(of_ranks) for of_ranks in zip(*(each[name] for each in everyone), strict=True)][
            args.warmup :
        ]
        for name in mine
    }


def summary(times_s: dict[str, list[float]]) -> list[Line]:
    """Return what times_s() comes to."""
    return [
        Line(
            name,
            statistics.median(steps) * 1e3,
            # Within a round: what slows down the machine for a while slows down all three.
            statistics.median(s - a for s, a in zip(steps, times_s[ALONE], strict=True)) * 1e3,
        )
        for name, steps in times_s.items()
    ]


def _ratio(lines: list[Line]) -> float | None:
    exposed = {line.name: line.exposed_ms for line in lines}
    theirs = exposed.get(_DDP, 0.0)
    return exposed[_OURS] / theirs if theirs > 0 else None


def _lines(outcome: Outcome) -> list[str]:
    text = [
        f"# ringcomm bench optimizer {outcome.version}: {outcome.model}, "
        f"{outcome.parameters / 1e6:.1f} M parameters, {outcome.batch} samples per rank",
        f"# {outcome.size} ranks, {outcome.threads} thread(s) each, {outcome.steps} steps; "
        f"gradients and weights differ from DDP's by {outcome.difference:.1e}",
    ]
    if not outcome.is_equal:
        return [*text, f"# WRONG: more than {TOLERANCE:g} of the largest gradient; not timed"]
    text.append(f"{'':<18}{'step p50':>12}{'exposed':>12}")
    for line in outcome.lines:
        exposed = "" if line.name == ALONE else f"{line.exposed_ms:>9.2f} ms"
        text.append(f"{line.name:<18}{line.step_ms:>9.2f} ms{exposed}")
    ratio = "none: DDP hides all of it" if outcome.ratio is None else f"{outcome.ratio:.2f}"
    return [*text, f"exposed communication, ringcomm / DDP over gloo: {ratio}"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm bench optimizer",
        description="Measure a step of training under mpirun: without communication, with "
        "ringcomm's DistributedOptimizer, and with DDP over gloo. The exit code is 1 if the "
        "gradients of the two differ.",
    )
    count = functools.partial(at_least, 1)
    parser.add_argument("--model", choices=list(WORKLOADS), default="mlp")
    parser.add_argument("--steps", type=count, default=30, help="to time, of each; default 30")
    parser.add_argument("--warmup", type=functools.partial(at_least, 0), default=5)
    parser.add_argument("--batch", type=count, help="samples per rank; default 32 or 8")
    parser.add_argument("--threads", type=count, default=1, help="of torch per rank; default 1")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found, too")
    return parser


def at_least(least: int, text: str) -> int:
    """Return a number of the command line, which must not be less than `least`."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value
