"""Base of process groups: names, limits, and the start of an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from ringcomm.arrays.torch import TORCH
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.errors import NotInitializedError
from ringcomm.torch.distributed.compat import c10d
from ringcomm.torch.distributed.group.callbacks import Path, is_in_callback, path_here
from ringcomm.torch.distributed.group.devices import Devices
from ringcomm.torch.distributed.group.native_backend import put_inside
from ringcomm.torch.distributed.group.new_group import compare
from ringcomm.torch.distributed.group.options import CallOptions, call_options
from ringcomm.torch.distributed.group.work import CombinedWork, Work

Tensors = Sequence[torch.Tensor]

# Groups of a rank are numbered: an operation on one may be started by a callback of another, which
# is another group on each row of a mesh.
_n_made: WeakKeyDictionary[Engine, int] = WeakKeyDictionary()


class BaseGroup(c10d.ProcessGroup):  # type: ignore[misc] # its signatures are not those of its callers
    """A process group without operations; see ProcessGroup."""

    def __init__(self, store: Any, group: Group, timeout_s: float | None) -> None:
        super().__init__(group.index, group.size)  # a store is not taken from subclasses
        self.group = group
        self._store = store
        self._timeout_s = timeout_s
        self._devices = Devices(store, group.index, group.size, timeout_s)
        self._coalesced: list[Work] | None = None
        self._is_shut_down = False
        self._name, self._desc = "", "undefined"
        put_inside(self)
        current = engine()
        self._engine = ref(current)  # also in threads that have another, or none
        self._number = _n_made[current] = _n_made.get(current, 0) + 1

    # --- starting an operation ------------------------------------------------------------------
    def start(
        self,
        call: CallOptions,
        kind: str,
        results: Tensors,
        plan: Callable[..., Plan[Any]],
        *args: Any,
    ) -> Work:
        """Carry out what plan(group, *args) plans, or begin it if the caller may wait later."""
        self._require_open()

        def checked(g: Group) -> Plan[Any]:
            """Plan it; what cannot be written is a bad argument like others."""
            for each in results:
                if each.layout is torch.strided and not each.is_contiguous():
                    TORCH.require_writable(each)
            return plan(g, *args)

        timeout_s = self._timeout_s if call.timeout_s is None else call.timeout_s
        current = self._engine() or engine()
        path = path_here(self._number)
        name = None if path is None else path.name_in(self._number)
        options: Any = {"timeout_s": timeout_s, "is_once": path is not None}
        if call.is_async or self._coalesced is not None:
            handle = current.start(kind, name, checked, self.group, **options)
            if path is None:
                path = Path(self._number, f"#{handle.number}")
            return self._noted(Work(handle, results, path))
        current.execute(kind, name, checked, self.group, **options)
        return Work(None, results, path)

    def compare_members(self, ranks: Sequence[int]) -> None:
        """Compare what ranks pass to new_group(). Collective; MismatchError if members differ."""
        callers = c10d.get_process_group_ranks(self)
        number = self.group.ledger_for(self.group.engine).next_place
        options = call_options(None)
        self.start(options, "new_group", [], lambda _: compare(ranks, callers, number)).wait()

    @property
    def _is_special(self) -> bool:
        """True where an operation may not simply be carried out."""
        return self._is_shut_down or self._coalesced is not None or is_in_callback()

    def _noted(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _require_open(self) -> None:
        if self._is_shut_down:
            raise NotInitializedError(
                f"process group {self.group!r} was destroyed: make a new one with new_group()"
            )

    # --- several calls as one -------------------------------------------------------------------
    def _start_coalescing(self, device: Any) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work:
        del device
        works, self._coalesced = self._coalesced or [], None
        return CombinedWork(works)

    # --- what torch asks a group ----------------------------------------------------------------
    def get_group_store(self) -> Any:
        """Return the store it was made with."""
        return self._store

    # C++ looks for these five; its own need a backend in C++.
    def getBackendName(self) -> str:
        """Return "ringcomm"."""
        return "ringcomm"

    def getGroupName(self) -> str:
        """Return the name by which operators find it."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name by which operators find it."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return what it is for."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set what it is for."""
        self._desc = desc

    name = _get_backend_name = getBackendName
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def _get_backend(self, device: torch.device) -> Any:
        """Return what carries out operations on a device: this, for the CPU."""
        return self if torch.device(device).type == "cpu" else self._devices.by_type(device)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *self._devices.types]

    @property
    def supports_splitting(self) -> bool:
        """False: c10d.split_group() wants NCCL; see split_group()."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """False: messages between ranks need not be batched."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the deadline of each operation that is called from now on."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the engine numbers operations from the first one on."""

    def _get_sequence_number_for_group(self) -> int:
        return self.group.ledger_for(engine()).next_place - 1

    def shutdown(self) -> None:
        """Take part in nothing more; what is under way goes on."""
        self._is_shut_down = True
        self._devices.shutdown()
