"""The command line of `ringcomm bench ps`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ringcomm.launch.bench.options import new_file, parse_count, parse_names
from ringcomm.launch.bench.ps.cases import CASES, Case
from ringcomm.launch.bench.ps.peer import PEERS


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        cases: in the order of the table.
        against: other libraries, by name.
        rounds: in which everybody has a turn.
        has_step: a training step, too.
        steps: of it to time.
        json: file to write.
    """

    cases: tuple[Case, ...]
    against: tuple[str, ...]
    rounds: int
    has_step: bool
    steps: int
    json: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` asks for.

    Raises:
        SystemExit: after --help (code 0), or a wrong command line (code 2).
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if not args.cases and not args.step:
        parser.error("--cases none leaves nothing to measure without --step")
    cases = [CASES[name] for name in args.cases]
    cases = [replace(case, n_sets=args.sets) if case.is_sparse else case for case in cases]
    return Options(tuple(cases), args.against, args.rounds, args.step, args.steps, args.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm bench ps",
        usage="mpirun -np N ringcomm bench ps [options]",
        description="Measure pushes and pulls of N - 1 workers, each with one request outstanding, "
        "to a server, the last rank: what they take by the clock, and of the CPUs. All values are "
        "checked; the exit code is 1 if any was wrong. docs/benchmarks.md says how to read it.",
    )
    parser.add_argument(
        "--cases",
        type=lambda text: () if text == "none" else parse_names(text, tuple(CASES)),
        default=tuple(CASES),
        metavar="NAME,...",
        help=f"{', '.join(CASES)}, all (default), or none",
    )
    parser.add_argument(
        "--against",
        type=lambda text: () if text == "none" else parse_names(text, PEERS),
        default=(),
        metavar="NAME,...",
        help="torch-rpc: torch.distributed.rpc as it is; torch-rpc-uv: without its shared memory, "
        "which it polls; or none (default)",
    )
    parser.add_argument(
        "--sets",
        type=parse_count,
        default=CASES["sparse"].n_sets,
        help="of 10,000 keys each, which the sparse table has and calls use in turn; default 10",
    )
    parser.add_argument("--rounds", type=parse_count, default=15, help="default 15")
    parser.add_argument(
        "--step",
        action="store_true",
        help="a training step of 20 M parameters, too: with the server, and with the ring",
    )
    parser.add_argument("--steps", type=parse_count, default=30, help="of it; default 30")
    parser.add_argument("--json", type=new_file, metavar="FILE", help="write what was found, too")
    return parser
