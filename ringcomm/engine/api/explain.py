"""Why a collective goes the way it goes."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.collectives.layout import describe
from ringcomm.collectives.op import SUM, Op, ReductionOptions
from ringcomm.collectives.select import Case, Choice
from ringcomm.config import COLLECTIVES
from ringcomm.engine.api.world import engine
from ringcomm.engine.core.call import checked_options
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.executors.device import TransportChoice, device_executor, is_on_gpu
from ringcomm.errors import ConfigError


@dataclass(frozen=True, repr=False)
class GpuExplanation:
    """How a group's arrays on GPUs travel, in words: print it.

    Attributes:
        choice: the transport, and why not the others; None: the first operation will choose.
        wanted: RINGCOMM_GPU_TRANSPORT.
        problem: why this rank can use no GPU, and what to do; empty if it can.
    """

    choice: TransportChoice | None
    wanted: str
    problem: str = ""

    def __str__(self) -> str:
        if self.choice is not None:
            return f"arrays on GPUs: {self.choice}"
        if self.problem:
            return f"arrays on GPUs: this rank can use no GPU; {self.problem}"
        how = "the first usable of nccl, ipc and staged"
        if self.wanted != "auto":
            how = f"{self.wanted}, as RINGCOMM_GPU_TRANSPORT says"
        return f"arrays on GPUs: not chosen yet; the group's first operation on them takes {how}"

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Explanation:
    """A choice in words: print it.

    Attributes:
        case: what is to be carried out.
        op: the operator.
        choice: the algorithm, with the seconds of each that fits and why the others do not.
    """

    case: Case
    op: Op
    choice: Choice

    def __str__(self) -> str:
        case, choice = self.case, self.choice
        how = f" {self.op}" if case.collective != "allgather" else ""
        how += ", deterministic" if case.is_deterministic else ""
        lines = [
            f"{case.collective} of {bytes_text(case.nbytes)} {case.dtype}{how} on "
            f"{describe(case.nodes)}: {choice.algorithm}, {_because(self)}"
        ]
        width = max(map(len, [*choice.seconds, *choice.unfit]))
        # The estimates are for what messages take; nobody chooses by them where memory is shared.
        is_told = choice.is_measured or choice.why != "memory"
        times = choice.seconds if is_told else {}
        lines += [f"  {name:<{width}}  {s * 1e6:10.1f} us" for name, s in times.items()]
        lines += [f"  {name:<{width}}  no: {reason}" for name, reason in choice.unfit.items()]
        return "\n".join(lines)

    __repr__ = __str__


def explain(
    nbytes: int,
    dtype: Any = "float32",
    *,
    collective: str = "allreduce",
    op: Op = SUM,
    deterministic: bool = False,
    group: Group | None = None,
    device: str = "cpu",
) -> Explanation | GpuExplanation:
    """Return which algorithm such a collective goes by, and why; print it. Local.

    Args:
        nbytes: of the whole buffer, of an allgather that of the result.
        dtype: a name ("bfloat16"), or what numpy or torch call a dtype.
        collective: "allreduce", "reduce_scatter" or "allgather".
        op: operator of the reduction.
        deterministic: elements are to be reduced in rank order.
        group: whose collective; None: all ranks. This rank need not be a member.
        device: "cuda": for arrays on GPUs, which of their transports the group's first operation
            chose; until then it looks for a GPU, which loads cupy and starts the driver.

    Raises:
        TypeError: no such dtype, or an operator without meaning for it, or nbytes is no int.
        ValueError: no such collective, or nbytes is negative.
        NotInitializedError: init() has not run.
    """
    if collective not in COLLECTIVES:
        raise ValueError(
            f"collective is {collective!r}; it must be one of {', '.join(COLLECTIVES)}"
        )
    if isinstance(nbytes, bool) or not hasattr(nbytes, "__index__"):
        raise TypeError(f"nbytes is {nbytes!r}; it must be a number of bytes, an int")
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be >= 0")
    for_gpu = is_on_gpu(device)
    current = engine()
    group = current.groups.or_default(group)
    kind = _dtype(dtype)
    checked_options(ReductionOptions(op))
    if collective != "allgather":
        op.require(kind)
    if for_gpu:
        return _explain_gpu(current, group)
    shares_memory = group.shares_memory
    case = Case(collective, nbytes, kind, group.ranks.nodes, deterministic, shares_memory)
    return Explanation(case, op, current.selection.choice(case))


def _explain_gpu(current: EngineContext, group: Group) -> GpuExplanation:
    choice, problem = None, ""
    try:
        choice = device_executor().choice(current, group)
        if choice is None:
            device_executor().require(current)
    except ConfigError as error:
        problem = str(error)
    return GpuExplanation(choice, current.settings.gpu_transport, problem)


def bytes_text(nbytes: int) -> str:
    """Return "64 KiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def _because(explanation: Explanation) -> str:
    choice, n_ranks = explanation.choice, len(explanation.case.nodes)
    reasons = {
        "forced": "as RINGCOMM_ALGORITHM says",
        "measured": "the fastest that `ringcomm tune` measured",
        "estimated": f"the fastest by estimate (to measure: mpirun -np {n_ranks} ringcomm tune)",
        "only": "the only one that can",
        "memory": "for its ranks share their node's memory",
    }
    but = f" ({choice.overruled}, as RINGCOMM_ALGORITHM says, cannot)" if choice.overruled else ""
    return reasons[choice.why] + but


def _dtype(dtype: Any) -> DType:
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        with contextlib.suppress(TypeError):
            name = np.dtype(dtype).name  # np.float32, "f4"
    if name not in DTYPES:
        hint = f". Pass collective={dtype!r}" if dtype in COLLECTIVES else ""
        raise TypeError(f"{dtype!r} cannot be sent; dtypes are {', '.join(DTYPES)}{hint}")
    return DTYPES[name]
