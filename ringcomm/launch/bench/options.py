"""The command line of `ringcomm bench`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringcomm.arrays.dtypes import DTYPES
from ringcomm.collectives.op import Op
from ringcomm.launch.bench.bandwidth import COLLECTIVES
from ringcomm.launch.bench.engines import MODES, PEERS, Mode
from ringcomm.launch.bench.sizes import parse_sizes

BUFFERS = ("registered", "private")


@dataclass(frozen=True)
class Options:
    """What to measure.

    Attributes:
        collectives, dtypes, ops: by name.
        sizes: in bytes, rising.
        forms: False: out of place, True: in place.
        buffers: of ringcomm; None: all that there are.
        against: other engines, by name.
        mode: the form of ringcomm's calls.
        is_mpi_default: MPI alone, with its own settings.
        seconds: for each size, about.
        iterations: batches of each lane; None: by `seconds`.
        json, plot: files to write.
    """

    collectives: tuple[str, ...]
    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    sizes: tuple[int, ...]
    forms: tuple[bool, ...]
    buffers: tuple[str, ...] | None
    against: tuple[str, ...]
    mode: Mode
    is_mpi_default: bool
    seconds: float
    iterations: int | None
    json: Path | None
    plot: Path | None


def parse(argv: Sequence[str]) -> Options:
    """Return what `argv` asks for.

    Raises:
        SystemExit: after --help (code 0), or a wrong command line (code 2).
    """
    parser = _parser()
    args = parser.parse_args(argv)
    if args.mpi_defaults and (args.against != ("native",) or args.mode != "sync"):
        parser.error("--mpi-defaults measures MPI alone: no --against and no --mode with it")
    return Options(
        collectives=args.collective,
        dtypes=args.dtype,
        ops=args.op,
        sizes=args.sizes,
        forms=args.forms or (False, True),
        buffers=args.buffers,
        against=args.against,
        mode=args.mode,
        is_mpi_default=args.mpi_defaults,
        seconds=args.seconds,
        iterations=args.iterations,
        json=args.json,
        plot=args.plot,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ringcomm bench",
        usage="ringcomm bench [options]              under mpirun -np N\n"
        "       ringcomm bench optimizer [options]    a step of training, under mpirun -np N\n"
        "       ringcomm bench ddp [options]          torch.distributed, under mpirun -np N\n"
        "       ringcomm bench ps [options]           parameter servers, under mpirun -np N\n"
        "       ringcomm bench compare FILE.json ...  files of --json against the goals",
        description="Measure the collectives beside other engines, interleaved in one process. "
        "Each size is checked bit by bit; the exit code is 1 if any result was wrong. "
        "docs/benchmarks.md says how to read it.",
    )
    what = parser.add_argument_group("what")
    what.add_argument(
        "--collective",
        type=lambda text: parse_names(text, tuple(COLLECTIVES)),
        default=("allreduce",),
        metavar="NAME,...",
        help=f"{', '.join(COLLECTIVES)} or all; default allreduce",
    )
    what.add_argument(
        "--dtype",
        type=lambda text: parse_names(text, tuple(DTYPES)),
        default=("float32",),
        metavar="NAME,...",
        help="float32 (default), float16, bfloat16, ... or all",
    )
    what.add_argument(
        "--op",
        type=lambda text: parse_names(text, tuple(op.value for op in Op)),
        default=("sum",),
        metavar="NAME,...",
        help=f"{', '.join(op.value for op in Op)} or all; default sum",
    )
    what.add_argument(
        "--sizes",
        type=_sizes,
        default=parse_sizes("8:64M"),
        metavar="8:256M[:4],...",
        help="ranges by powers of 2 (or another factor) and single sizes; default 8:64M",
    )
    _add_lanes(parser)
    how = parser.add_argument_group("how long")
    how.add_argument("--seconds", type=_positive, default=2.0, help="for each size; default 2")
    how.add_argument("--iterations", type=parse_count, help="batches of each line instead")
    result = parser.add_argument_group("result")
    result.add_argument("--json", type=new_file, metavar="FILE", help="write all that was found")
    result.add_argument("--plot", type=new_file, metavar="FILE.png", help="draw a picture, too")
    return parser


def _add_lanes(parser: argparse.ArgumentParser) -> None:
    who = parser.add_argument_group("who")
    who.add_argument(
        "--against",
        type=lambda text: () if text == "none" else parse_names(text, PEERS),
        default=("native",),
        metavar="NAME,...",
        help="native (default): MPI's own; gloo: torch.distributed's; or none",
    )
    who.add_argument(
        "--mpi-defaults",
        action="store_true",
        help="MPI alone, with its own settings instead of ringcomm's",
    )
    who.add_argument(
        "--buffers",
        type=lambda text: parse_names(text, BUFFERS),
        metavar="NAME,...",
        help="of ringcomm: registered (rc.empty), private (numpy's own); default both",
    )
    who.add_argument(
        "--mode",
        choices=MODES,
        default="sync",
        help="of ringcomm: allreduce(x), allreduce_async(x).wait(), or the same with a name",
    )
    form = who.add_mutually_exclusive_group()
    form.add_argument(
        "--in-place", dest="forms", action="store_const", const=(True,), help="only that form"
    )
    form.add_argument(
        "--out-of-place", dest="forms", action="store_const", const=(False,), help="only that form"
    )


def parse_names(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in "A,B,C", all that are known for "all".

    Raises:
        ArgumentTypeError: one is not known.
    """
    if text == "all":
        return known
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
    return names


def _sizes(text: str) -> tuple[int, ...]:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def parse_count(text: str) -> int:
    """Return a number that must not be less than 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def new_file(text: str) -> Path:
    """Return the path; its folder must exist: after minutes of measuring it would be too late."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path
