"""Lets scripts that import horovod.torch run on ringcomm unchanged.

    mpirun -np 4 python -m ringcomm.torch.as_horovod train.py --epochs 3

or, as the first lines of a script:

    from ringcomm.torch.as_horovod import install
    install()

From then on `import horovod.torch as hvd` gives ringcomm.torch. Nothing is written to disk, and an
installed Horovod is hidden in this process alone.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

import ringcomm.torch as face
from ringcomm import errors
from ringcomm.torch import compression, elastic, optimizer
from ringcomm.torch.horovod import compat, process_sets, reduce_op

VERSION: Final = "0.28.1"  # whose names and defaults these are; scripts look at it

_STATE = ("broadcast_parameters", "broadcast_optimizer_state", "broadcast_object")
_COMPRESSION = ("Compression", "Compressor", "NoneCompressor", "FP16Compressor", "BF16Compressor")


def install() -> None:
    """Let `import horovod` and its torch modules give ringcomm's names in this process.

    Raises:
        RuntimeError: Horovod itself has been imported already.
    """
    there = sys.modules.get("horovod")
    if there is not None and not hasattr(there, "__ringcomm__"):
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
    """Return what each module of Horovod's is to hold."""
    everything = _taken(face, face.__all__)
    everything["check_extension"] = compat.check_extension
    mpi_ops = {"handle_average_backwards_compatibility": reduce_op.op_of}
    exceptions = {
        "HorovodInternalError": errors.RingcommError,
        "HorovodVersionMismatchError": compat.HorovodVersionMismatchError,
        "HostsUpdatedInterrupt": elastic.HostsUpdatedInterrupt,
    }
    run = {"run": compat.run}
    states = _taken(elastic, ("State", "ObjectState"))
    return {
        "horovod": {"__version__": VERSION} | run,
        "horovod.runner": run,
        "horovod.torch": everything,
        "horovod.torch.mpi_ops": everything | mpi_ops | compat.autograd_functions(),
        "horovod.torch.functions": _taken(face, (*_STATE, "allgather_object")),
        "horovod.torch.optimizer": _taken(optimizer, ("DistributedOptimizer",)),
        "horovod.torch.sync_batch_norm": {"SyncBatchNorm": face.SyncBatchNorm},
        "horovod.torch.compression": _taken(compression, _COMPRESSION),
        "horovod.torch.elastic": _taken(elastic, ("run", "TorchState", "ElasticSampler")) | states,
        "horovod.torch.elastic.state": {"TorchState": elastic.TorchState},
        "horovod.torch.elastic.sampler": {"ElasticSampler": elastic.ElasticSampler},
        "horovod.common": {},
        "horovod.common.elastic": {"run_fn": elastic.run} | states,
        "horovod.common.exceptions": exceptions,
        "horovod.common.util": compat.util(),
        "horovod.common.process_sets": _taken(
            process_sets, ("ProcessSet", "add_process_set", "remove_process_set")
        )
        | {"global_process_set": face.global_process_set},
    }


def _taken(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def main(arguments: list[str]) -> None:
    """Run a script, or with -m a module, as Python would."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(
            "usage: python -m ringcomm.torch.as_horovod [-m] SCRIPT [ARGUMENTS ...]\n\n"
            "Runs SCRIPT with horovod.torch being ringcomm.torch; with -m it is a module's name.",
            file=sys.stdout if arguments[:1] else sys.stderr,
        )
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = arguments[0].rpartition("/")[0] or "."
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
