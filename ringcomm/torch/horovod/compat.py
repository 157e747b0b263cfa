"""Functions of Horovod's modules besides its collectives, for scripts that import them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import torch
from torch.torch_version import TorchVersion

from ringcomm import config
from ringcomm.torch.compression import Compression
from ringcomm.torch.horovod import data_collectives, job, reductions

T = TypeVar("T")

_BUILT: Final = ("mpi", "gloo", "nccl", "cuda", "rocm", "ddl", "ccl")


class HorovodVersionMismatchError(ImportError):
    """Horovod was built for another framework version. Never raised: nothing is built for one.

    Attributes:
        name: of the framework.
        version: that was imported.
        installed_version: that Horovod was built for.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} is {version}, and built for was {installed_version}", name=name)
        self.version = version
        self.installed_version = installed_version


def util() -> dict[str, Any]:
    """Return what horovod.common.util holds, as far as scripts use it."""
    functions = (
        check_extension, check_installed_version, env, extension_available, gpu_available,
        is_iterable, is_version_greater_equal_than, num_rank_is_power_2, split_list,
    )  # fmt: skip
    names = {each.__name__: each for each in functions}
    built = [f"{each}_built" for each in _BUILT]
    return names | {name: _with_verbose(getattr(job, name)) for name in built}


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Do nothing for "horovod.torch".

    Raises:
        ImportError: it is that of another framework.
    """
    del ext_env_var, pkg_path, args
    if not ext_name.startswith("horovod.torch"):
        raise ImportError(f"{ext_name}: ringcomm stands in for horovod.torch alone")


def check_installed_version(name: str, version: str, exception: Any = None) -> None:
    """Do nothing: no version of torch is built for."""
    del name, version, exception


def env(**kwargs: str | None) -> AbstractContextManager[None]:
    """Set variables of this process's environment for a block; those that are None stay."""
    given = {name: value for name, value in kwargs.items() if value is not None}
    return config.changed_environment(**given)


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for "torch"."""
    del verbose
    return ext_base_name == "torch"


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return True for "torch" where torch can use a GPU."""
    del verbose
    return extension_available(ext_base_name) and torch.cuda.is_available()


def is_iterable(x: Any) -> bool:
    """Return True if there is an iterator over x."""
    return isinstance(x, Iterable)


def is_version_greater_equal_than(ver: str, target: str) -> bool:
    """Return True if version `ver`, as "2.6.0+cpu", is not before `target`, as "1.13.0"."""
    return bool(TorchVersion(ver) >= target)


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return True for 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(l: Sequence[T], n: int) -> list[Sequence[T]]:  # noqa: E741 - Horovod's name
    """Return n parts of consecutive values of l, the first ones longer by one."""
    short, n_longer = divmod(len(l), n)
    ends = [(part + 1) * short + min(part + 1, n_longer) for part in range(n)]
    return [l[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def autograd_functions() -> dict[str, type]:
    """Return what stands for the autograd functions of horovod.torch.mpi_ops: their apply()."""

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
    """Return the question in the form that takes `verbose`."""

    def ask(verbose: bool = False) -> Any:
        del verbose
        return is_built()

    return ask
