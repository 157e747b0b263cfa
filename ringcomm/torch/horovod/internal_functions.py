"""Functions of Horovod's internal modules that scripts import."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import torch
from torch.torch_version import TorchVersion

from ringcomm import config
from ringcomm.torch.compression import Compression
from ringcomm.torch.horovod import basics, data_collectives, reductions

T = TypeVar("T")

_BUILT: Final = (
    "mpi_built", "gloo_built", "nccl_built", "cuda_built", "rocm_built", "ddl_built", "ccl_built",
)  # fmt: skip


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another version of a framework. ringcomm never raises it.

    Attributes:
        name: name of the framework.
        version: its imported version.
        installed_version: the version that Horovod was built for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {version}; Horovod needs {installed_version}", name=name)
        self.version = version
        self.installed_version = installed_version


def util() -> dict[str, Any]:
    functions = (
        check_extension, check_installed_version, env, extension_available, gpu_available,
        is_iterable, is_version_greater_equal_than, num_rank_is_power_2, split_list,
    )  # fmt: skip
    names: dict[str, Any] = {each.__name__: each for each in functions}
    return names | {name: _with_verbose(getattr(basics, name)) for name in _BUILT}


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    del ext_env_var, pkg_path, args
    if not ext_name.startswith("horovod.torch"):
        raise ImportError(f"{ext_name}: ringcomm stands in for horovod.torch alone")


def check_installed_version(name: str, version: str, exception: Any = None) -> None:
    """Do nothing: ringcomm is not built for one version of torch."""
    del name, version, exception


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    given = {name: value for name, value in kwargs.items() if value is not None}
    return config.changed_environment(**given)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    del verbose
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    del verbose
    return extension_available(ext_base_name) and torch.cuda.is_available()


def is_iterable(x: Any) -> bool:
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    return bool(TorchVersion(ver) >= target)


def num_rank_is_power_2(num_rank: int) -> bool:
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Split l into n consecutive parts; the first len(l) % n parts have one value more."""
    short, n_longer = divmod(len(l), n)
    ends = [(part + 1) * short + min(part + 1, n_longer) for part in range(n)]
    return [l[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def autograd_functions() -> dict[str, type]:
    """Return classes with the apply() of the autograd functions in horovod.torch.mpi_ops, by name.

    The arguments of apply() have the order that Horovod gives them.
    """

    def allreduce(x: Any, average: Any, name: Any, op: Any, *others: Any) -> Any:
        return reductions.allreduce(x, average, name, Compression.none, op, *others)

    def grouped_allreduce(average: Any, name: Any, op: Any, *others: Any) -> Any:
        how, xs = (average, name, Compression.none, op, *others[:3]), others[3:]
        return tuple(reductions.grouped_allreduce(xs, *how))

    def grouped_allgather(name: Any, process_set: Any, *xs: Any) -> Any:
        return tuple(data_collectives.grouped_allgather(xs, name, process_set))

    def reducescatter(x: Any, name: Any, *others: Any) -> Any:
        return reductions.reducescatter(x, name, Compression.none, *others)

    def grouped_reducescatter(name: Any, *others: Any) -> Any:
        how, xs = (name, Compression.none, *others[:4]), others[4:]
        return tuple(reductions.grouped_reducescatter(xs, *how))

    functions: dict[str, Callable[..., Any]] = {
        "HorovodAllreduce": allreduce,
        "HorovodGroupedAllreduce": grouped_allreduce,
        "HorovodAllgather": data_collectives.allgather,
        "HorovodGroupedAllgather": grouped_allgather,
        "HorovodBroadcast": data_collectives.broadcast,
        "HorovodAlltoall": data_collectives.alltoall,
        "HorovodReducescatter": reducescatter,
        "HorovodGroupedReducescatter": grouped_reducescatter,
    }
    return {name: type(name, (), {"apply": staticmethod(f)}) for name, f in functions.items()}


def _with_verbose(is_built: Callable[[], Any]) -> Callable[..., Any]:
    def is_built_verbosely(verbose: bool = False) -> Any:
        del verbose
        return is_built()

    return is_built_verbosely
