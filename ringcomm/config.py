"""Reads settings from the environment. Only this module and launched/ read it."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from ringcomm.errors import ConfigError
from ringcomm.launched.child_marks import RANK_PROCESS, RUN_FOLDER, RUN_FOLDER_ID
from ringcomm.launched.launcher import is_on, launched_rank

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")

_log = logging.getLogger("ringcomm")
_PREFIX = "RINGCOMM_"
_PARAMETER = "RINGCOMM_PARAM_"  # of the program; see rc.Params
PARAMETERS_FILE = "RINGCOMM_PARAMS"

ALGORITHMS = ("node", "ring", "segmented", "direct", "circulant", "hierarchical")
GPU_TRANSPORTS = ("nccl", "ipc", "staged")  # in the order in which they are tried
_FUSION_MIB, _GPU_FUSION_MIB = 25.0, 64.0
COLLECTIVES = ("allreduce", "reduce_scatter", "allgather")  # those that have several algorithms


@dataclass(frozen=True)
class Settings:
    """Settings that a user sets by RINGCOMM_<NAME>, the field name in capitals.

    Attributes:
        timeout_s: deadline of every wait, in seconds; 0 = none.
        stall_warning_s: seconds after which a wait is reported, once; 0 = never.
        hints: 1 = what looks like a mistake is told once: that all ranks train on the same data, or
            that hvd.init() has found no other ranks; 0 = it is not.
        grace_s: seconds that the other ranks of a node have to end after one rank has failed.
        fusion_mib: maximal size of a bucket of gradients, in MiB; None: see fusion_nbytes().
        timeline: prefix of each rank's Chrome trace, `<timeline>.<rank>.json`; "" = no trace.
        algorithm: "ring" for all collectives, or "allreduce:ring,allgather:direct" for some; "auto"
            uses measurements or estimates.
        gpu_transport: how arrays on GPUs travel: "nccl", "ipc" or "staged"; "auto" takes the first
            of these that works.
        nccl_16bit_sums: 1 = NCCL adds 16-bit floats in their own dtype, and rounds at every step;
            0 = they are added in float32 and rounded once.
        read_memory: 1 = this rank reads long messages, and what long collectives copy, in the
            private memory of the other ranks of its node, where the system allows it, and asks Yama
            to let these read in its own; 0 = they come through shared memory, and this rank asks
            for nothing.
        nvtx: 1 = NVIDIA's profilers show the operations on GPUs by their names; 0 = they do not.
        ps_servers: number of parameter servers that ps.init() makes by default: 1 or more; 1 if it
            is not set, or as many ranks as declare to be servers.
        elastic: 1 = the job goes on after it has lost ranks, see docs/elastic.md; 0 = it ends.
        elastic_losses: how many ranks an elastic job may lose, and how often its size may change,
            together; each takes two MPI communicators.
        elastic_hang_s: deadline of every wait of an elastic job; a rank for which the others wait
            in vain is killed, and the job goes on. 0 = it ends with timeout_s.
        elastic_min: an elastic job with fewer ranks waits for others, and ends with code 75 if none
            come.
        spares: number of processes of an elastic job, after its ranks, that load the program and
            wait for the place of a lost rank; each takes two MPI communicators.
        reserves: number of processes, after the spares, that sleep in init() until they are needed.
        ps_evaluators: number of evaluators that ps.init() makes by default.
        ps_spares: number of spare servers that ps.init() makes by default, in an elastic job.
        ps_worker_spares: number of ranks that ps.init() lets stand by for workers and evaluators by
            default, likewise.
        prometheus_token_file: file with the token that `ringcomm top --prometheus-port` asks for;
            "" = none.
        tensorboard: folder for TensorBoard's files, which rank 0 writes; "" = none.
        tuning: folder of the tables that `ringcomm tune` writes; "" = in the user's cache.
        traceback: "full" = a traceback that ends the program shows ringcomm's own frames, too;
            "short" = it does not.
    """

    timeout_s: float = 600.0
    stall_warning_s: float = 30.0
    hints: int = 1
    grace_s: float = 3.0
    fusion_mib: float | None = None
    timeline: str = ""
    algorithm: str = "auto"
    gpu_transport: str = "auto"
    nccl_16bit_sums: int = 0
    read_memory: int = 1
    nvtx: int = 0
    tuning: str = ""
    traceback: str = "short"
    tensorboard: str = ""
    prometheus_token_file: str = ""
    ps_servers: int = 0
    elastic: int = 0
    elastic_losses: int = 8
    elastic_hang_s: float = 0.0
    elastic_min: int = 1
    spares: int = 0
    reserves: int = 0
    ps_evaluators: int = 0
    ps_spares: int = 0
    ps_worker_spares: int = 0

    @property
    def forced(self) -> dict[str, str]:
        """Collective -> the algorithm that the user has chosen. Raises ConfigError."""
        forced: dict[str, str] = {}
        chosen = set()
        for item in self.algorithm.split(","):
            collective, colon, algorithm = item.rpartition(":")
            known = collective in COLLECTIVES if colon else True
            if not known or algorithm not in (*ALGORITHMS, "auto"):
                raise ConfigError(
                    f"{_PREFIX}ALGORITHM is {self.algorithm!r}; it must be auto or one of "
                    f"{', '.join(ALGORITHMS)}, or such a choice for some collectives, as in "
                    f"allreduce:ring,allgather:direct; collectives are {', '.join(COLLECTIVES)}."
                )
            if collective in chosen:
                raise ConfigError(
                    f"{_PREFIX}ALGORITHM is {self.algorithm!r}, which has two choices for "
                    f"{collective or 'all collectives'}."
                )
            chosen.add(collective)
            forced |= dict.fromkeys([collective] if colon else COLLECTIVES, algorithm)
        return {each: algorithm for each, algorithm in forced.items() if algorithm != "auto"}

    @property
    def shared(self) -> tuple[str, ...]:
        """NAME=VALUE of the settings that must be the same on all ranks."""
        return (
            f"{_PREFIX}ALGORITHM={self.algorithm}",
            f"{_PREFIX}GPU_TRANSPORT={self.gpu_transport}",
            f"{_PREFIX}NCCL_16BIT_SUMS={self.nccl_16bit_sums:g}",
            f"{_PREFIX}FUSION_MIB={self._fusion_text}",
            f"{_PREFIX}ELASTIC={self.elastic:g}",
            f"{_PREFIX}ELASTIC_LOSSES={self.elastic_losses:g}",
            f"{_PREFIX}ELASTIC_HANG_S={self.elastic_hang_s:g}",
            f"{_PREFIX}ELASTIC_MIN={self.elastic_min:g}",
            f"{_PREFIX}SPARES={self.spares:g}",
            f"{_PREFIX}RESERVES={self.reserves:g}",
        )

    @property
    def _fusion_text(self) -> str:
        if self.fusion_mib is None:
            return f"{_FUSION_MIB:g} ({_GPU_FUSION_MIB:g} on GPUs)"
        return f"{self.fusion_mib:g}"

    def fusion_nbytes(self, place: str | None) -> float:
        """Return the maximal size of a bucket in host memory (place None) or on a GPU ("cuda").

        An operation on a GPU takes longer to begin, and less time per byte.
        """
        usual = _FUSION_MIB if place is None else _GPU_FUSION_MIB
        return (usual if self.fusion_mib is None else self.fusion_mib) * (1 << 20)

    @property
    def kills_hanging_ranks(self) -> bool:
        return bool(self.elastic and self.elastic_hang_s)

    @property
    def timeout_or_inf(self) -> float:
        """Deadline of a wait in seconds; math.inf if it has none."""
        limits = [self.timeout_s, self.elastic_hang_s if self.elastic else 0.0]
        return min((each for each in limits if each), default=math.inf)

    @property
    def timeout_name(self) -> str:
        is_hang = self.kills_hanging_ranks and self.timeout_or_inf == self.elastic_hang_s
        return _PREFIX + ("ELASTIC_HANG_S" if is_hang else "TIMEOUT_S")

    @property
    def stall_warning_or_inf(self) -> float:
        return self.stall_warning_s or math.inf


def shows_all_frames(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if tracebacks are to show ringcomm's own frames; works before init()."""
    return environ.get(_PREFIX + "TRACEBACK") == "full"


def environment() -> dict[str, str]:
    return dict(os.environ)


@contextlib.contextmanager
def changed_environment(**variables: str | None) -> Iterator[None]:
    """For a block, set variables of this process's environment, and unset those that are None."""
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


def program_parameters(environ: Mapping[str, str] = os.environ) -> tuple[str, dict[str, str]]:
    """Return the TOML file of rc.Params ("": none), and the RINGCOMM_PARAM_ variables by name."""
    values = {
        variable.removeprefix(_PARAMETER): text
        for variable, text in environ.items()
        if variable.startswith(_PARAMETER)
    }
    return environ.get(PARAMETERS_FILE, ""), values


def tuning_folder(settings: Settings, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the folder of the tables of `ringcomm tune`; None if this user has no home."""
    if settings.tuning:
        return settings.tuning
    cache = _user_cache(environ)
    return cache and os.path.join(cache, "tuning")


def kernel_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of compiled kernels for GPUs; None if this user has no home."""
    from pathlib import Path  # takes 5 ms, which a rank without a GPU saves

    cache = _user_cache(environ)
    return None if cache is None else Path(cache, "kernels")


def _user_cache(environ: Mapping[str, str]) -> str | None:
    xdg = environ.get("XDG_CACHE_HOME", "")
    cache = xdg if xdg.startswith("/") else os.path.expanduser("~/.cache")  # XDG: not a relative
    if cache.startswith("~"):  # HOME is not set, and the user's number has no entry
        return None
    return os.path.join(cache, "ringcomm")


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of `environ` (this process's by default).

    A RINGCOMM_ variable that is not known may be somebody else's: of a Kubernetes service or of a
    site's module that are called ringcomm. The first rank logs a warning, once.

    Raises:
        ConfigError: a value is not valid, or the name of a variable that is not known differs from
            a setting's in one or two letters.
    """
    known = {_PREFIX + f.name.upper(): f for f in fields(Settings)}
    values: dict[str, Any] = {}
    others: list[str] = []
    for variable in environ:
        is_ours = variable.startswith(_PREFIX) and not variable.startswith(_PARAMETER)
        if not is_ours or variable in (RANK_PROCESS, RUN_FOLDER, RUN_FOLDER_ID, PARAMETERS_FILE):
            continue
        if variable not in known:
            meant = next((name for name in known if _differ_in_two_letters(variable, name)), "")
            if meant:
                raise ConfigError(
                    f"{variable} is not a setting of ringcomm. Did you mean {meant}? Known: "
                    f"{', '.join(known)}."
                )
            others.append(variable)
            continue
        field, text = known[variable], environ[variable]
        values[field.name] = _value(variable, text, str(field.type))
    if others and launched_rank(environ) == 0:
        _warn_of(", ".join(others))
    found = Settings(**values)
    if values.get("ps_servers") == 0:
        raise ConfigError(
            f"{_PREFIX}PS_SERVERS is 0, and ps.init() needs one server at least. Set it to 1 or "
            "more, or unset it"
        )
    for name in ("SPARES", "RESERVES", "PS_SPARES", "PS_WORKER_SPARES"):
        if values.get(name.lower()) and not found.elastic:
            raise ConfigError(
                f"{_PREFIX}{name} is {values[name.lower()]}, and {_PREFIX}ELASTIC is 0: only an "
                f"elastic job has places for other ranks. Set {_PREFIX}ELASTIC=1"
            )
    if found.traceback not in ("short", "full"):
        raise ConfigError(f"{_PREFIX}TRACEBACK is {found.traceback!r}; it must be short or full.")
    _ = found.forced  # raises if RINGCOMM_ALGORITHM is wrong
    if found.gpu_transport not in ("auto", *GPU_TRANSPORTS):
        raise ConfigError(
            f"{_PREFIX}GPU_TRANSPORT is {found.gpu_transport!r}; it must be auto or one of "
            f"{', '.join(GPU_TRANSPORTS)}."
        )
    return found


def argument_or(found: T, argument: str, given: int | None, *, warns: bool) -> int | T:
    """Return `given`, an argument of ps.init(), or if it is None `found`, of its variable.

    warns: log a warning if both say something, and differ.
    """
    if given is None:
        return found
    if warns and found and found != given:
        _log.warning(
            "ps.init(%s=%d) counts, and %sPS_%s=%s, which `ringcomm run --%s` sets, does not. "
            "Leave the argument out, so that the command decides",
            argument, given, _PREFIX, argument.upper(), found, argument.replace("_", "-"),
        )  # fmt: skip
    return given


@functools.cache  # once
def _warn_of(names: str) -> None:
    _log.warning(
        "%s: not settings of ringcomm, which ignores them. Another program's variables may be "
        "called so; docs/running.md lists the settings",
        names,
    )


def _differ_in_two_letters(a: str, b: str) -> bool:
    """Return True if at most two letters are to be put in, left out or replaced."""
    row = list(range(len(b) + 1))  # the differences of a[:n] from b[:0], b[:1], ...
    for n, letter in enumerate(a, 1):
        before, row = row, [n]
        for k, other in enumerate(b, 1):
            row.append(min(before[k] + 1, row[k - 1] + 1, before[k - 1] + (letter != other)))
    return row[-1] <= 2


# Horovod's variables that correspond to one of our settings: name -> (setting, factor).
_HOROVOD = {
    "HOROVOD_FUSION_THRESHOLD": ("fusion_mib", 1 / (1 << 20)),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": ("stall_warning_s", 1.0),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": ("timeout_s", 1.0),
}
_LEVELS = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}


def horovod_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Return read_settings(), with Horovod's variables where the RINGCOMM_ variable is not set.

    Raises:
        ConfigError: as read_settings(), or a value of Horovod's is not valid.
    """
    found = read_settings(environ)
    changes: dict[str, Any] = {}
    for variable, (field, factor) in _HOROVOD.items():
        if variable in environ:
            changes[field] = _number(variable, environ[variable]) * factor
    if is_on(environ.get("HOROVOD_STALL_CHECK_DISABLE", "")):
        changes["stall_warning_s"] = 0.0
    timeline = environ.get("HOROVOD_TIMELINE", "")
    if timeline and timeline != "DYNAMIC":  # DYNAMIC: the program may start a timeline later
        changes["timeline"] = timeline.removesuffix(".json")
    ours = {field for field in changes if _PREFIX + field.upper() in environ}
    return replace(found, **{field: v for field, v in changes.items() if field not in ours})


def horovod_log_level(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return Python's name of the level in HOROVOD_LOG_LEVEL, None if that is not set."""
    text = environ.get("HOROVOD_LOG_LEVEL", "").upper()
    level = _LEVELS.get(text, text)
    known = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    if text and level not in known:
        raise ConfigError(
            f"HOROVOD_LOG_LEVEL is {text!r}; it must be trace, debug, info, warning, error or fatal"
        )
    return level or None


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
