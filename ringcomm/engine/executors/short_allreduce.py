"""Short calls: blocking allreduces inside a node that take a few microseconds in C++.

A plan, a task and a coroutine would cost more than the rendezvous in shared memory. A short call
looks up a prepared KnownAllreduce by dtype, shape and operator instead. If ranks disagree or one is
late, the call becomes a task like any other.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np

from ringcomm._core import KnownAllreduce
from ringcomm.arrays import adapter_for
from ringcomm.collectives.operators import AVERAGE, Op, ReductionOptions
from ringcomm.engine.core.call import reduction_call
from ringcomm.engine.core.current_engine import engine
from ringcomm.engine.core.engine import Engine
from ringcomm.engine.core.group import Group, ShortAllreduce
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.transport.node import N_UNNAMED
from ringcomm.transport.node.shared_memory import NodeTeam

_MAX_KNOWN = 4096


class ShortCalls:
    """The unnamed in-place allreduces of one group, whose ranks meet in `team`."""

    def __init__(self, engine: Engine, group: Group, team: NodeTeam) -> None:
        self._engine = weakref.ref(engine)
        self._group = weakref.ref(group)  # weak: the group refers to this object
        self._ledger = group.ledger_for(engine)
        self._team = team
        self._known: dict[tuple[Any, Any, Op], KnownAllreduce] = {}

    def allreduce_(self, x: Any, op: Op, timeout_s: float | None = None) -> bool:
        """Reduce x in place and return True if a short call can do so; else only return False.

        timeout_s: deadline; None: RINGCOMM_TIMEOUT_S. Raises the errors of rc.allreduce_().
        """
        is_numpy = type(x) is np.ndarray
        try:
            known = self._known.get((x.dtype, x.shape, op))
        except (AttributeError, TypeError):
            return False
        if known is None:
            self._learn(x, op)
            return False
        address = None if is_numpy else _address(x)
        if not (x.flags.carray if is_numpy else address is not None):
            return False
        group, engine = self._group(), self._engine()
        if group is None or engine is None:
            return False
        place = task = None
        try:
            place = engine.take_place(self._ledger, self._team)
            if place is None:
                return False
            slot = place % N_UNNAMED
            step = known.run_on(slot, x) if address is None else known.run(slot, address)
            if step is None:
                self._team.end_turn(place)
            else:
                plan = plan_allreduce(group, None, x, ReductionOptions(op), in_place=True)
                task = engine.adopt(place, step, plan, group, timeout_s=timeout_s)
                engine.completion.result_of(task)
        except BaseException as error:
            if task is None or not task.is_over:  # other ranks wait for this operation
                label = "an operation" if place is None else f"operation #{place}"
                engine.completion.break_engine(error, label)
            raise
        if step is None and not is_numpy:
            adapter_for(x).written(x)
        return True

    def _learn(self, x: Any, op: Op) -> None:
        """Prepare a KnownAllreduce for the next call with such an x, if x can be reduced."""
        if not isinstance(op, Op) or len(self._known) >= _MAX_KNOWN:
            return
        try:
            adapter = adapter_for(x)
            if type(x) is np.ndarray:
                memoryview(x)  # type: ignore[arg-type]  # raises for bfloat16, which is no buffer
            call = reduction_call("allreduce_", None, ReductionOptions(op), x, adapter)
        except (TypeError, ValueError, BufferError):
            return
        dtype = adapter.dtype(x)
        nbytes = dtype.itemsize * int(np.prod(adapter.shape(x), dtype=np.int64))
        divisor = self._team.team.size if op is AVERAGE else 1
        self._known[x.dtype, x.shape, op] = KnownAllreduce(
            self._team.team,
            call.fingerprint ^ self._team.digest,
            nbytes,
            op.kernel,
            dtype.kernel,
            divisor,
            self._team.moment_s,
        )


def short_calls_of(group: Group) -> ShortAllreduce | None:
    if group.short_calls is None and group.team is not None:
        group.short_calls = ShortCalls(engine(), group, group.team)
    return group.short_calls


def _address(x: Any) -> int | None:
    """Return the address of a tensor that needs no copy, else None."""
    torch = sys.modules.get("torch")
    if (
        torch is None
        or type(x) not in (torch.Tensor, torch.nn.Parameter)
        or x.layout is not torch.strided
        or not x.is_cpu
        or not x.is_contiguous()
        or x.is_conj()
        or x.is_neg()
    ):
        return None
    address: int = x.data_ptr()
    if not address or address % x.element_size():
        return None
    storage = x.untyped_storage()  # resize_() may have freed the part that x is in
    return address if address + x.nbytes <= storage.data_ptr() + storage.nbytes() else None
