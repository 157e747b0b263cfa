"""A backend inside each process group, which passes calls from C++ on to the group's methods.

C++, such as the operators of torch.ops.c10d, calls the backend that a group has for a device. From
torch 2.14 on a class in Python can be that backend. torch.distributed still calls the group itself,
because a Work of such a backend loses is_completed(), result() and the source of a message.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ringcomm.torch.distributed.compat import VERSION, CppBackend, c10d

_PASSED_ON = (
    "_end_coalescing", "_get_sequence_number_for_group", "_set_sequence_number_for_group",
    "_start_coalescing", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "allreduce_sparse",
    "alltoall", "barrier", "broadcast", "gather", "getBackendName", "monitored_barrier", "name",
    "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "scatter", "send", "set_timeout", "shutdown",
)  # fmt: skip


def add_backend_for_cpp(group: Any) -> None:
    """Give a process group a backend for CPU and GPU, if this torch accepts backends in Python."""
    if CppBackend is not None:
        inner = _inner_class()(group)
        custom = c10d.ProcessGroup.BackendType.CUSTOM
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), custom, inner)
        if VERSION >= (2, 15):  # torch's flight recorder reads names of the default backend
            group._set_default_backend(custom)


@functools.cache
def _inner_class() -> Any:
    base: Any = CppBackend

    class Inner(base):  # type: ignore[misc] # it is there from torch 2.14 on
        supports_splitting = supports_coalescing = supports_time_estimate = False

        def __init__(self, group: Any) -> None:
            super().__init__(group.rank(), group.size())
            self.find_group = weakref.ref(group)  # weak: the group holds this backend

    for name in _PASSED_ON:
        setattr(Inner, name, _passing_on(name))
    return Inner


def _passing_on(name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **named: Any) -> Any:
        return getattr(self.find_group(), name)(*args, **named)

    call.__name__ = name
    return call
