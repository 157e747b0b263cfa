"""Puts modules with Horovod's names, which hold ringcomm's functions, into sys.modules."""

from __future__ import annotations

import functools
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, TypeVar

import ringcomm.torch as face
from ringcomm import errors
from ringcomm.launch.run import run as run_ranks
from ringcomm.torch import compression, elastic, optimizer
from ringcomm.torch.horovod import internal_functions
from ringcomm.torch.horovod.reduce_op import op_of

T = TypeVar("T")
VERSION: Final = "0.28.1"  # of the Horovod that has these names and defaults; scripts read it

_STATE = ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object")
_COMPRESSION = ("Compression", "Compressor", "NoneCompressor", "FP16Compressor", "BF16Compressor")
_PROCESS_SETS = ("ProcessSet", "add_process_set", "remove_process_set", "global_process_set")
_HERE: Final = ("localhost", "127.0.0.1")


def install() -> None:
    """Make `import horovod` and `import horovod.torch` give ringcomm's names in this process.

    Raises:
        RuntimeError: this process has imported Horovod already.
    """
    imported = sys.modules.get("horovod")
    if imported is not None and not hasattr(imported, "__ringcomm__"):
        raise RuntimeError(
            "horovod has been imported in this process already: call install() before that"
        )
    modules = _modules()
    for name, names in modules.items():
        module = ModuleType(name, f"ringcomm.torch by the name of {name}.")
        is_package = any(other.startswith(f"{name}.") for other in modules)
        module.__spec__ = ModuleSpec(name, None, is_package=is_package)
        if is_package:
            module.__path__ = []
        module.__dict__.update(names, __ringcomm__=True)
        sys.modules[name] = module
    for name in modules:
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, sys.modules[name])


def _modules() -> Mapping[str, dict[str, Any]]:
    everything = _pick(face, face.__all__) | {"check_extension": internal_functions.check_extension}
    mpi_ops = {
        "handle_average_backwards_compatibility": lambda op, average: op_of(op, average)  # noqa: PLW0108 - it has these two arguments
    }
    exceptions = {
        "HorovodInternalError": errors.RingcommError,
        "HorovodVersionMismatchError": internal_functions.HorovodVersionMismatchError,
        "HostsUpdatedInterrupt": elastic.HostsUpdatedInterrupt,
    }
    states = _pick(elastic, ("State", "ObjectState"))
    return {
        "horovod": {"__version__": VERSION, "run": run},
        "horovod.runner": {"run": run},
        "horovod.torch": everything,
        "horovod.torch.mpi_ops": everything | mpi_ops | internal_functions.autograd_functions(),
        "horovod.torch.functions": _pick(face, (*_STATE, "allgather_object")),
        "horovod.torch.optimizer": _pick(optimizer, ("DistributedOptimizer",)),
        "horovod.torch.sync_batch_norm": {"SyncBatchNorm": face.SyncBatchNorm},
        "horovod.torch.compression": _pick(compression, _COMPRESSION),
        "horovod.torch.elastic": _pick(elastic, ("run", "TorchState", "ElasticSampler"))
        | states
        | {"run_fn": run_fn},
        "horovod.torch.elastic.state": {"TorchState": elastic.TorchState},
        "horovod.torch.elastic.sampler": {"ElasticSampler": elastic.ElasticSampler},
        "horovod.common": {},
        "horovod.common.elastic": {"run_fn": run_fn} | states,
        "horovod.common.exceptions": exceptions,
        "horovod.common.util": internal_functions.util(),
        "horovod.common.process_sets": _pick(face, _PROCESS_SETS),
    }


def _pick(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def run(
    func: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    *,
    np: int | None = None,
    hosts: str | None = None,
    mpi_args: str | None = None,
    verbose: Any = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    start_timeout: float | None = None,
    disable_cache: bool | None = None,
    **others: Any,
) -> list[T]:
    """Return what func returns on each rank of a new job on this host; see ringcomm.run().

    Args:
        func: the function that each rank calls.
        args: positional arguments of func.
        kwargs: keyword arguments of func.
        num_proc: number of ranks.
        np: older name of num_proc; if it is not None, num_proc is ignored.
        hosts: this host, such as "localhost:4", or None.
        mpi_args: options of mpirun.
        verbose: ignored, as are use_mpi, start_timeout and disable_cache.
        use_mpi: see verbose.
        use_gloo: must be None or False.
        start_timeout: see verbose.
        disable_cache: see verbose.
        others: Horovod's other options; each must be None.

    Raises:
        ValueError: ringcomm has no counterpart of an option.
    """
    del verbose, use_mpi, start_timeout, disable_cache
    others |= {"use_gloo": use_gloo or None, "hosts": None if _is_here(hosts) else hosts}
    unknown = [f"{name}={value!r}" for name, value in others.items() if value is not None]
    if unknown:
        raise ValueError(
            f"horovod.run({', '.join(unknown)}): ringcomm has no counterpart. It starts ranks on "
            "this host with mpirun: omit the option, or start the job with "
            "mpirun --host ... python -m ringcomm.torch.as_horovod train.py"
        )
    options = shlex.split(mpi_args or "")
    call = functools.update_wrapper(functools.partial(_call, _Alias(), func), func)
    return run_ranks(call, args, kwargs, num_proc if np is None else np, mpirun_options=options)


def run_fn(func: Callable[..., T], reset: Any) -> Callable[..., T]:
    """Return elastic.run(func); the ranks agree on a new view themselves, so `reset` is ignored."""
    del reset
    return elastic.run(func)


class _Alias:
    """Calls install() when it is unpickled; only after that does pickle look up horovod's names."""

    def __reduce__(self) -> Any:
        return install, ()


def _call(_: Any, func: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    return func(*args, **kwargs)


def _is_here(hosts: str | None) -> bool:
    return all(each.partition(":")[0] in _HERE for each in (hosts or _HERE[0]).split(","))
