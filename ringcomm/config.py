"""The one reader (and, for MPI's start-up settings, writer) of the environment."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Container, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ringcomm.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

_PREFIX = "RINGCOMM_"
# Set by init() for the processes that this rank starts, so that they know they are no ranks.
_RANK_PROCESS = "RINGCOMM_RANK_PROCESS"

ALGORITHMS = ("node", "ring", "segmented", "direct", "circulant", "hierarchical")
COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")  # those that have several algorithms


@dataclass(frozen=True)
class Settings:
    """What a user can set by RINGCOMM_<NAME>; the field name in capitals.

    Attributes:
        timeout_s: deadline of every wait, in seconds; 0 = never.
        stall_warning_s: a wait of this many seconds is reported once; 0 = never.
        grace_s: after a rank failed, the seconds the others of its node have to end by themselves.
        fusion_mib: gradients are fused into buckets of at most this many MiB.
        autotune: 1 = the first steps try out bucket sizes, the best is kept; 0 = fusion_mib.
        timeline: each rank writes a Chrome trace to `<timeline>.<rank>.json`; "" = none.
        algorithm: "ring" for all collectives or "allreduce:ring,allgather:direct" for some; "auto"
            chooses by what was measured or is estimated.
        ps_servers: how many parameter servers ps.init() makes where it is not told; 0 = 1.
        tuning: folder of the tables that `ringcomm tune` writes; "" = in the user's cache.
    """

    timeout_s: float = 600.0
    stall_warning_s: float = 30.0
    grace_s: float = 3.0
    fusion_mib: float = 25.0
    autotune: float = 0.0
    timeline: str = ""
    algorithm: str = "auto"
    tuning: str = ""
    ps_servers: int = 0

    @property
    def forced(self) -> dict[str, str]:
        """The algorithm that the user wants, by collective."""
        return _forced(self.algorithm)

    @property
    def shared(self) -> tuple[str, ...]:
        """What all ranks must have alike, for they derive from it who sends what, as NAME=VALUE."""
        return (
            f"{_PREFIX}ALGORITHM={self.algorithm}",
            f"{_PREFIX}FUSION_MIB={self.fusion_mib:g}",
            f"{_PREFIX}AUTOTUNE={self.autotune:g}",
        )

    @property
    def timeout_or_inf(self) -> float:
        """The deadline in seconds, math.inf where the user set 0."""
        return self.timeout_s or math.inf

    @property
    def stall_warning_or_inf(self) -> float:
        """When to warn, in seconds, math.inf where the user set 0."""
        return self.stall_warning_s or math.inf


def environment() -> dict[str, str]:
    """Return a copy of this process's environment, for a child that is to get another one."""
    return dict(os.environ)


@contextlib.contextmanager
def changed_environment(**variables: str | None) -> Iterator[None]:
    """Set variables of this process's environment, or unset those that are None, for a block."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def tuning_folder(settings: Settings, environ: Mapping[str, str] | None = None) -> Path:
    """Return where `ringcomm tune` keeps its tables."""
    environ = os.environ if environ is None else environ
    from pathlib import Path  # 8 ms: not a cost of `import ringcomm`

    if settings.tuning:
        return Path(settings.tuning)
    cache = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification ignores a relative one.
    return (
        (Path(cache) if cache.startswith("/") else Path.home() / ".cache") / "ringcomm" / "tuning"
    )


def settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return the settings of `environ` (this process's by default).

    Raises:
        ConfigError: a RINGCOMM_ variable that is not known, or is no number >= 0, or no algorithm.
    """
    environ = os.environ if environ is None else environ
    known = {_PREFIX + f.name.upper(): f for f in fields(Settings)}
    values: dict[str, Any] = {}
    for variable in environ:
        if not variable.startswith(_PREFIX) or variable == _RANK_PROCESS:
            continue
        if variable not in known:
            import difflib  # only a mistake needs it

            close = difflib.get_close_matches(variable, known, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"{variable} is not a setting of ringcomm.{hint} Known: {', '.join(known)}."
            )
        field, text = known[variable], environ[variable]
        values[field.name] = _value(variable, text, str(field.type))
    found = Settings(**values)
    _ = found.forced  # a mistake in it is told here
    return found


# Horovod's variables that mean one of our settings: name -> (setting, factor).
_HOROVOD = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_mib", 1 / (1 << 20)),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warning_s", 1.0),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("timeout_s", 1.0),
}
_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}


def horovod_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Return settings() with what Horovod's variables say where no RINGCOMM_ variable does.

    Raises:
        ConfigError: one of them is no number >= 0.
    """
    environ = os.environ if environ is None else environ
    found = settings(environ)
    changes: dict[str, Any] = {}
    for variable, (field, factor) in _HOROVOD.items():
        if variable in environ:
            changes[field] = _number(variable, environ[variable]) * factor
    if _is_on(environ.get("HOROVOD_STALL_CHECK_DISABLE", "")):
        changes["stall_warning_s"] = 0.0
    if _is_on(environ.get("HOROVOD_AUTOTUNE", "")):
        changes["autotune"] = 1.0
    timeline = environ.get("HOROVOD_TIMELINE", "")
    if timeline and timeline != "DYNAMIC":  # that one means: it may be started later
        changes["timeline"] = timeline.removesuffix(".json")
    ours = {field for field in changes if _PREFIX + field.upper() in environ}
    return replace(found, **{field: v for field, v in changes.items() if field not in ours})


def horovod_log_level(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the level of logging that HOROVOD_LOG_LEVEL names, None if it does not."""
    environ = os.environ if environ is None else environ
    text = environ.get("HOROVOD_LOG_LEVEL", "").upper()
    level = _LEVELS.get(text, text)
    known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if text and level not in known:
        raise ConfigError(
            f"HOROVOD_LOG_LEVEL is {text!r}; it must be trace, debug, info, warning, error or fatal"
        )
    return level or None


def _is_on(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


def _forced(text: str) -> dict[str, str]:
    """Read RINGCOMM_ALGORITHM."""
    forced = {}
    chosen = set()
    for item in text.split(","):
        collective, colon, algorithm = item.rpartition(":")
        known = collective in COLLECTIVES if colon else True
        if not known or algorithm not in (*ALGORITHMS, "auto"):
            raise ConfigError(
                f"{_PREFIX}ALGORITHM is {text!r}; it must be auto or one of "
                f"{', '.join(ALGORITHMS)}, or such a choice for some collectives, as in "
                f"allreduce:ring,allgather:direct; collectives are {', '.join(COLLECTIVES)}."
            )
        if collective in chosen:
            what = collective or "all collectives"
            raise ConfigError(f"{_PREFIX}ALGORITHM is {text!r}, which has two choices for {what}.")
        chosen.add(collective)
        for each in [collective] if colon else COLLECTIVES:
            forced[each] = algorithm
    return {
        collective: algorithm for collective, algorithm in forced.items() if algorithm != "auto"
    }


def _value(variable: str, text: str, kind: str) -> float | int | str:
    if kind == "str":
        return text
    number = _number(variable, text)
    if kind == "int" and not number.is_integer():
        raise ConfigError(f"{variable} is {text!r}; it must be a whole number >= 0.")
    return int(number) if kind == "int" else number


def _number(variable: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value >= 0:  # also NaN
        raise ConfigError(f"{variable} is {text!r}; it must be a number >= 0.")
    return value


# --- what the launcher said -------------------------------------------------------------------
_WORLD_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_size(environ: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Return the variable by which a launcher promised more than one rank, and their number.

    SLURM_NTASKS is no sign: it is set for a plain python inside sbatch, too.
    """
    environ = os.environ if environ is None else environ
    for variable in _WORLD_SIZES:
        text = environ.get(variable, "")
        if text.isdigit() and int(text) > 1:
            return variable, int(text)
    return None


_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "PMI_ID")


def is_launched_by_mpi(environ: Mapping[str, str] | None = None) -> bool:
    """Return True if an MPI launcher started this process, of any number of ranks."""
    environ = os.environ if environ is None else environ
    return any(name in environ for name in _RANK_VARIABLES) or launched_size(environ) is not None


_FOREIGN = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "GROUP_RANK": "torchrun",
    "RAY_JOB_ID": "Ray",
    "RAY_ADDRESS": "Ray",
}


def foreign_launcher(environ: Mapping[str, str] | None = None) -> str:
    """Return the name of a launcher that is not MPI's, "" if there is no sign of one."""
    environ = os.environ if environ is None else environ
    return next((name for variable, name in _FOREIGN.items() if variable in environ), "")


def torch_ranks(environ: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return what torch.distributed's variables say, by "rank" and "world_size".

    Raises:
        ConfigError: one is no number.
    """
    environ = os.environ if environ is None else environ
    found = {}
    for variable in ("RANK", "WORLD_SIZE"):
        text = environ.get(variable, "")
        if text and not text.isdigit():
            raise ConfigError(f"{variable} is {text!r}; it must be a number >= 0, or not be set.")
        if text:
            found[variable.lower()] = int(text)
    return found


def missing_of_torch(
    given: Container[str] = (), environ: Mapping[str, str] | None = None
) -> list[str]:
    """Return which of the variables that torch's env:// needs are not set, and not in `given`."""
    environ = os.environ if environ is None else environ
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return [name for name in needed if not environ.get(name) and name.lower() not in given]


def launched_rank(environ: Mapping[str, str] | None = None) -> int:
    """Return the rank that a launcher gave this process, 0 if none did; before init()."""
    environ = os.environ if environ is None else environ
    found = (environ.get(variable, "") for variable in _WORLD_RANKS)
    return next((int(text) for text in found if text.isdigit()), 0)


def is_fault_tolerant(environ: Mapping[str, str] | None = None) -> bool:
    """Return True under `mpirun --with-ft ulfm`."""
    environ = os.environ if environ is None else environ
    return _is_on(environ.get("OMPI_MCA_mpi_ft_enable", ""))


def _launch(environ: Mapping[str, str]) -> str:
    """Tell one launch of a rank from another: a job that a rank starts is not its child."""
    names = ("PMIX_NAMESPACE", "PMIX_RANK", "PMI_RANK", "PMI_FD", "PMI_PORT", "SLURM_STEP_ID")
    return "/".join(environ.get(name, "-") for name in names)


def mark_children_of_this_rank(environ: MutableMapping[str, str] | None = None) -> None:
    """Let processes started from now on know that they are children of a rank."""
    environ = os.environ if environ is None else environ
    environ[_RANK_PROCESS] = f"{os.getpid()} {_launch(environ)}"


def parent_rank_pid(environ: Mapping[str, str] | None = None) -> int | None:
    """Return the pid of the rank whose child (fork or exec) this process is, else None."""
    environ = os.environ if environ is None else environ
    pid, _, launch = environ.get(_RANK_PROCESS, "").partition(" ")
    if not pid.isdigit() or int(pid) == os.getpid() or launch != _launch(environ):
        return None
    return None if _launcher_since(int(pid)) else int(pid)


# MPICH numbers the ranks of every job alike, so its variables do not tell a job from one inside it.
_LAUNCHERS = ("hydra_pmi_proxy", "mpiexec", "mpirun", "prterun", "prted", "orted")


def _launcher_since(ancestor: int) -> bool:
    """Return True if a launcher stands between this process and that ancestor."""
    pid = os.getppid()
    while pid not in (0, 1, ancestor):
        try:
            with open(f"/proc/{pid}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return False
        if name.startswith(_LAUNCHERS) or name in [launcher[:15] for launcher in _LAUNCHERS]:
            return True
        pid = int(rest.split()[1])
    return False


# --- what MPI must be told before it starts ------------------------------------------------------
# Measured on Open MPI 5.0.11: coll/han returns wrong sums across hosts after a rank is killed
# (open-mpi/ompi#11794); one TCP connection per pair is half duplex (11 against 22 MB/s on a
# 24 MB/s link); spinning ranks starve each other when they outnumber the cores.
_ALWAYS = {
    "OMPI_MCA_coll": "^han",
    "OMPI_MCA_btl_tcp_links": "2",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
# Start-up 0.2-0.5 s instead of 1.3-2.4 s. Between hosts they would throw InfiniBand's UCX away.
_ON_ONE_HOST = {
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_btl": "self,sm,tcp",
}
# Without a launcher nobody removes the segment that btl/sm makes in /dev/shm (Open MPI 5.0.11).
_ALONE = _ON_ONE_HOST | {"OMPI_MCA_btl": "self,tcp"}


def set_mpi_defaults(environ: MutableMapping[str, str] | None = None) -> list[str]:
    """Set MPI's start-up settings where the user has not; return those set, as NAME=VALUE."""
    environ = os.environ if environ is None else environ
    wanted = dict(_ALWAYS)
    n_local = environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
    if n_local is not None and n_local == environ.get("OMPI_COMM_WORLD_SIZE"):
        wanted |= _ON_ONE_HOST
    elif not any(name in environ for name in ("PMIX_RANK", "PMI_RANK")):
        wanted |= _ALONE
    added = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(added)
    return [f"{name}={value}" for name, value in added.items()]
