"""Reads the command line of `ringcomm run`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ringcomm.errors import ConfigError
from ringcomm.launch.command_line import CommandParser
from ringcomm.launch.job.hosts import Host, parse_host_file, parse_hosts
from ringcomm.launch.job.plan_types import LAUNCHERS, RunRequest
from ringcomm.launch.option_types import seconds

GRACE_S: Final = 20.0
RESTARTS: Final = 3
_DASHES: Final = "\0--"  # stands for "--", which argparse would take from the program's arguments


@dataclass(frozen=True)
class Arguments:
    """The command line: the job, and how this command runs it."""

    request: RunRequest
    run_folder: Path | None  # None: a new one in `runs`
    runs: Path
    grace_s: float
    restarts: int  # how often an elastic job is started again
    is_dry_run: bool
    is_verbose: bool
    notes: tuple[str, ...]  # about flags


def parse_arguments(argv: Sequence[str], python: str) -> Arguments:
    """Return the arguments of a command line.

    Args:
        argv: the arguments after `ringcomm run`.
        python: the interpreter that runs scripts and modules.

    Raises:
        ConfigError: a host, a range, a host file or a quote is wrong.
        SystemExit: after --help, or if the command line is wrong (code 2).
    """
    parser = _parser()
    args = parser.parse_args([_DASHES if each == "--" else each for each in argv])
    program = _program(args, python)
    if not program:
        parser.error("name the program that the ranks run: ringcomm run -np 4 train.py")
    request = RunRequest(
        program=program,
        np=args.np,
        hosts=_hosts(args),
        servers=args.servers,
        evaluators=args.evaluators,
        spares=args.spares,
        worker_spares=args.worker_spares,
        reserves=args.reserves,
        elastic=_elastic(args),
        timeline=args.timeline,
        launcher=args.launcher,
        oversubscribes=args.oversubscribe,
        options=_options(args),
        variables=dict(args.variables),
        interfaces=tuple(name for each in args.interfaces for name in each.split(",")),
        ssh=_ssh(args),
    )
    return Arguments(
        request,
        run_folder=args.run_folder,
        runs=args.runs,
        grace_s=args.grace,
        restarts=args.restarts,
        is_dry_run=args.dry_run,
        is_verbose=args.verbose,
        notes=tuple(args.notes),
    )


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm run",
        description="Start a job: `ringcomm run -np 4 train.py --lr 0.1`. The program is a Python "
        "script, a module (-m), or any other command. Its output, its configuration and the "
        "record of its end are in a folder of their own.",
        epilog="Exit code: that of the rank that failed first, 128 + N after signal N, or 75 if "
        "the job was asked to stop and did so in order. Flags of horovodrun are understood, or "
        "refused with what to write instead.",
        allow_abbrev=False,
    )
    parser.set_defaults(variables=[], notes=[])
    # fmt: off
    add = parser.add_argument
    add("-np", "--num-proc", "-n", dest="np", type=_positive, metavar="N",
        help="number of workers; by default, the places of the hosts")
    add("-m", "--module", nargs=argparse.REMAINDER, default=[], metavar="MODULE ARGUMENT",
        help="run a module instead of a script")
    add = parser.add_argument_group("hosts, and ranks that are no workers").add_argument
    add("-H", "--hosts", metavar="H1:N1,H2:N2", help="hosts with their numbers of places")
    add("--hostfile", "-hostfile", "--host-file", type=Path, metavar="FILE",
        help="hosts, one per line: `h1 slots=4`, or one line per place")
    add("--oversubscribe", action="store_true", help="more ranks than places")
    add("--servers", type=_count, default=0, metavar="N", help="parameter servers, beside -np")
    add("--evaluators", type=_count, default=0, metavar="N", help="evaluators, beside -np")
    add("--spares", type=_count, default=0, metavar="N",
        help="ranks that wait to replace dead ones, beside -np")
    add("--worker-spares", type=_count, default=0, metavar="N",
        help="likewise, of workers and evaluators, where --spares are of servers")
    add("--reserves", type=_count, default=0, metavar="N",
        help="ranks that sleep until dead ones are to be replaced, beside -np")
    add("--elastic", metavar="MIN:MAX", help="go on with MIN to MAX workers when ranks die or come")
    add("--restarts", type=_count, default=RESTARTS, metavar="N",
        help="how often an elastic job is started again that could not go on, as when a host is "
        f"lost (default: {RESTARTS})")
    add = parser.add_argument_group("how the ranks are started").add_argument
    add("--launcher", choices=LAUNCHERS, default="mpirun", help="default: mpirun")
    add("--launcher-options", "--mpi-args", "--binding-args", dest="options", action="append",
        default=[], metavar="OPTIONS", help="further options of mpirun or srun, in quotes")
    add("--env", "-x", dest="variables", action="append", type=_variable, metavar="NAME[=VALUE]",
        help="a variable for the ranks; without a value, this process's, also on other hosts")
    add("--network-interfaces", "--network-interface", "--nics", dest="interfaces",
        action="append", default=[], metavar="NAMES",
        help="interfaces for traffic between hosts: eth0,eth1; several times for several")
    add("-p", "--ssh-port", type=_positive, metavar="PORT", help="port of ssh on other hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh to other hosts")
    add = parser.add_argument_group("the run").add_argument
    add("--runs", type=Path, default=Path("runs"), metavar="FOLDER",
        help="folder in which each run makes its own (default: runs)")
    add("--run-folder", "--output-filename", type=Path, metavar="FOLDER",
        help="the folder of this run")
    add("--timeline", action="store_const", const="", help="record a timeline in the run's folder")
    add("--timeline-filename", dest="timeline", type=_without_suffix, metavar="PREFIX",
        help="record a timeline in PREFIX.<rank>.json")
    add("--grace", type=seconds, default=GRACE_S, metavar="S",
        help=f"seconds that ranks have to stop when asked to (default: {GRACE_S:g})")
    add("--dry-run", action="store_true", help="print the command, and do nothing")
    add("-v", "--verbose", action="store_true", help="print the command before it runs")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM ARGUMENT")
    # fmt: on
    _add_horovodruns(parser)
    return parser


def _add_horovodruns(parser: argparse.ArgumentParser) -> None:
    hidden = argparse.SUPPRESS
    for flag, (name, text) in AS_VARIABLES.items():
        parser.add_argument(flag, action=_Variable, name=name, text=text, nargs=1, help=hidden)
    for flag, (name, text) in AS_SWITCHES.items():
        parser.add_argument(flag, action=_Variable, name=name, text=text, nargs=0, help=hidden)
    for flag, reason in WITHOUT_EFFECT.items():
        parser.add_argument(flag, action=_Note, note=f"{flag}: {reason}", nargs=0, help=hidden)
    for flag, (n, advice) in REFUSED.items():
        parser.add_argument(flag, action=_Refuse, advice=advice, nargs=n, help=hidden)
    for flag, whose in NUMBERS.items():
        parser.add_argument(flag, action=_RefuseNumber, whose=whose, nargs=1, help=hidden)
    add = parser.add_argument
    add("--min-np", "--min-num-proc", dest="min_np", type=_positive, help=hidden)
    add("--max-np", "--max-num-proc", dest="max_np", type=_positive, help=hidden)


class _Variable(argparse.Action):
    def __init__(self, *args: Any, name: str, text: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._name, self._text = name, text

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.variables = [*namespace.variables, (self._name, self._text.format(*values))]


class _Note(argparse.Action):
    """Notes that a flag has no effect."""

    def __init__(self, *args: Any, note: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._note = note

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        namespace.notes = [*namespace.notes, self._note]


class _Refuse(argparse.Action):
    """Ends the command with what to write instead."""

    def __init__(self, *args: Any, advice: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._advice = advice

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        parser.error(f"{option} is horovodrun's; here: {self._advice}")


class _RefuseNumber(argparse.Action):
    """Ends the command: another launcher calls the number of ranks so."""

    def __init__(self, *args: Any, whose: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._whose = whose

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        parser.error(f"{option} is {self._whose}; here: -np {values[0]}")


def _program(args: argparse.Namespace, python: str) -> tuple[str, ...]:
    """Return the command of a rank. `python` means the interpreter that ringcomm runs with."""
    if args.module:
        # `-m mod a b` has all in `module`, `--module=mod a b` has `a b` in `program`.
        return (python, "-m", *map(_with_dashes, [*args.module, *args.program]))
    given = args.program[1:] if args.program[:1] == [_DASHES] else args.program
    rest = [*map(_with_dashes, given)]
    if not rest:
        return ()
    if rest[0].endswith(".py"):
        return (python, *rest)
    return (python if rest[0] in ("python", "python3") else rest[0], *rest[1:])


def _with_dashes(argument: str) -> str:
    return "--" if argument == _DASHES else argument


def _hosts(args: argparse.Namespace) -> tuple[Host, ...]:
    if args.hosts is not None and args.hostfile is not None:
        raise ConfigError("pass -H or --hostfile, not both")
    if args.hosts is not None:
        return parse_hosts(args.hosts)
    if args.hostfile is None:
        return ()
    try:
        text = args.hostfile.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--hostfile {args.hostfile}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--hostfile {args.hostfile}: it is no text, {error}") from error
    try:
        return parse_host_file(text)
    except ConfigError as error:
        raise ConfigError(f"--hostfile {args.hostfile}: {error}") from error


def _options(args: argparse.Namespace) -> tuple[str, ...]:
    text = " ".join(args.options)
    try:
        return tuple(shlex.split(text))
    except ValueError as error:  # a quote that is not closed
        raise ConfigError(f"--launcher-options {text}: {error}") from error


def _elastic(args: argparse.Namespace) -> tuple[int, int] | None:
    text = args.elastic
    if args.min_np or args.max_np:
        if text:
            raise ConfigError("pass --elastic MIN:MAX, or horovodrun's --min-np and --max-np")
        low, high = args.min_np or args.np or 1, args.max_np or args.np or args.min_np
        text = f"{low}:{high}"
    if text is None:
        return None
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and 1 <= int(low) <= int(high)):
        raise ConfigError(f"--elastic {text}: it must be MIN:MAX with 1 <= MIN <= MAX, as in 2:8")
    if args.np is not None and not int(low) <= args.np <= int(high):
        raise ConfigError(f"--elastic {text}: -np {args.np} is not in this range")
    return int(low), int(high)


def _ssh(args: argparse.Namespace) -> tuple[str, ...]:
    port = ("-p", str(args.ssh_port)) if args.ssh_port else ()
    key = ("-i", args.ssh_identity_file) if args.ssh_identity_file else ()
    return (*port, *key)


def _positive(text: str) -> int:
    return _count(text, least=1)


def _count(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= {least}")
    return int(text)


def _variable(text: str) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    if not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME or NAME=VALUE")
    return name, value if equals else None


def _without_suffix(text: str) -> str:
    return text.removesuffix(".json")


# --- flags of horovodrun: their meaning here, or our way beside theirs ----------------------------
# Flags with a value, and the variable that has the same meaning. {} is the value.
AS_VARIABLES: Final = {
    "--fusion-threshold-mb": ("RINGCOMM_FUSION_MIB", "{}"),
    "--stall-check-warning-time-seconds": ("RINGCOMM_STALL_WARNING_S", "{}"),
    "--stall-check-shutdown-time-seconds": ("RINGCOMM_TIMEOUT_S", "{}"),
    "--log-level": ("HOROVOD_LOG_LEVEL", "{}"),
}
# Flags without a value.
AS_SWITCHES: Final = {
    "--no-stall-check": ("RINGCOMM_STALL_WARNING_S", "0"),
}
# Flags that ask for what is so anyway.
WITHOUT_EFFECT: Final = {
    "--mpi": "MPI starts the ranks",
    "--disable-cache": "nothing is cached",
    "--log-without-timestamp": "the log has no times unless the script adds them",
    "--log-hide-timestamp": "the log has no times unless the script adds them",
}
# Names of the number of ranks, and whose they are.
NUMBERS: Final = {
    "--np": "mpirun's",
    "--nproc_per_node": "torchrun's",
    "--nproc-per-node": "torchrun's",
}
# Flags that are refused: whether they have a value, and what to do.
REFUSED: Final = {
    "--gloo": (0, "the ranks are started by MPI; leave it out"),
    "--use-gloo": (0, "the ranks are started by MPI; leave it out"),
    "--use-mpi": (0, "the ranks are started by MPI anyway; leave it out"),
    "--jsrun": (0, "use mpirun, the default, or --launcher srun"),
    "--check-build": (0, "run `ringcomm check`"),
    "-cb": (0, "run `ringcomm check`"),
    "--start-timeout": (1, "--env RINGCOMM_TIMEOUT_S=N is the deadline of init() and operations"),
    "--config-file": (1, "give the options on the command line"),
    "--tcp": (0, "--launcher-options '--mca pml ob1 --mca btl self,tcp' with Open MPI"),
    "--mpi-threads-disable": (0, "ringcomm needs MPI_THREAD_MULTIPLE; leave it out"),
    "--no-mpi-threads-disable": (0, "leave it out"),
    "--num-nccl-streams": (1, "ringcomm chooses its streams; leave it out"),
    "--thread-affinity": (1, "--launcher-options '--bind-to core' binds ranks with Open MPI"),
    "--gloo-timeout-seconds": (1, "--env RINGCOMM_TIMEOUT_S=N"),
    "--cycle-time-ms": (1, "ringcomm has no cycle: it begins an operation at once; leave it out"),
    "--cache-capacity": (1, "ringcomm has no such cache; leave it out"),
    "--hierarchical-allreduce": (0, "--env RINGCOMM_ALGORITHM=allreduce:hierarchical"),
    "--no-hierarchical-allreduce": (0, "--env RINGCOMM_ALGORITHM=allreduce:ring, or leave it out"),
    "--hierarchical-allgather": (0, "--env RINGCOMM_ALGORITHM=allgather:hierarchical"),
    "--no-hierarchical-allgather": (0, "--env RINGCOMM_ALGORITHM=allgather:ring, or leave it out"),
    "--torus-allreduce": (0, "--env RINGCOMM_ALGORITHM=allreduce:hierarchical"),
    "--autotune": (0, "--env RINGCOMM_FUSION_MIB=N sets the bucket size; leave it out"),
    "--no-autotune": (0, "nothing is tuned while training runs; leave it out"),
    "--autotune-log-file": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-warmup-samples": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-steps-per-sample": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-bayes-opt-max-samples": (1, "nothing is tuned while training runs; leave it out"),
    "--autotune-gaussian-process-noise": (1, "nothing is tuned while training runs; leave it out"),
    "--timeline-mark-cycles": (0, "ringcomm has no cycle; leave it out"),
    "--no-timeline-mark-cycles": (0, "leave it out"),
    "--stall-check": (0, "stalls are reported anyway; leave it out"),
    "--log-with-timestamp": (0, "set up Python's logging in the script"),
    "--no-log-hide-timestamp": (0, "set up Python's logging in the script"),
    "--prefix-output-with-timestamp": (0, "print times in the script; the logs have none"),
    "-prefix-timestamp": (0, "print times in the script; the logs have none"),
    "--host-discovery-script": (1, "--elastic MIN:MAX with -H: hosts do not come and go"),
    "--slots-per-host": (1, "-H h1:4,h2:4, or a --hostfile with `h1 slots=4`"),
    "--elastic-timeout": (1, "--elastic MIN:MAX; waits end by --env RINGCOMM_TIMEOUT_S=N"),
    "--reset-limit": (1, "--elastic MIN:MAX --env RINGCOMM_ELASTIC_LOSSES=N"),
    "--blacklist-cooldown-range": (2, "--elastic MIN:MAX; there is no list of bad hosts"),
}
