"""A backend inside each process group, for callers in C++: it calls the group's methods.

Operators (torch.ops.c10d) and other C++ ask a group for the backend of a device, not the group.
From torch 2.14 on that can be a class in Python. It is not enough by itself, for its Work loses
is_completed(), result() and the source of a message: torch.distributed goes on calling the group.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ringcomm.torch.distributed import compat

_HANDED_ON = (
    "_end_coalescing", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
    "_start_coalescing", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "allreduce_sparse",
    "alltoall", "barrier", "broadcast", "gather", "getBackendName", "monitored_barrier", "name",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "scatter", "send", "set_timeout", "shutdown",
)  # fmt: skip


def put_inside(group: Any) -> None:
    """Give a process group a backend for the CPU, where torch can take one from Python."""
    if compat.CppBackend is not None:
        inner = _inner_class()(group)
        custom = compat.c10d.ProcessGroup.BackendType.CUSTOM
        group._register_backend(torch.device("cpu"), custom, inner)
        if compat.VERSION >= (2, 15):  # its flight recorder asks the default one for its names
            group._set_default_backend(custom)


@functools.cache
def _inner_class() -> Any:
    base: Any = compat.CppBackend

    class Inner(base):  # type: ignore[misc] # it is there from torch 2.14 on
        supports_splitting = supports_coalescing = supports_time_estimate = False

        def __init__(self, group: Any) -> None:
            super().__init__(group.rank(), group.size())
            self.find_group = weakref.ref(group)  # which holds this

    for name in _HANDED_ON:
        setattr(Inner, name, _handing_on(name))
    return Inner


def _handing_on(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.find_group(), name)(*args, **named)

    call.__name__ = name
    return call
