"""explain(): which algorithm or transport a collective uses, and why."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from ringcomm.arrays.dtypes import DTYPES, DType
from ringcomm.collectives.operators import SUM, Op, ReductionOptions
from ringcomm.collectives.ranks_by_host import describe
from ringcomm.collectives.select_algorithm import Case, Choice
from ringcomm.config import COLLECTIVES
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.call import checked_options
from ringcomm.engine.core.context import EngineContext
from ringcomm.engine.core.group import Group
from ringcomm.engine.operations.base import TransportChoice, device_executor, is_on_gpu
from ringcomm.errors import ConfigError
from ringcomm.integers import is_integer
from ringcomm.transport.wire_team import most_brought


@dataclass(frozen=True, repr=False)
class GpuExplanation:
    """The transport of a group's arrays on GPUs; print() shows it with the reason.

    Attributes:
        choice: the transport, and why not another; None before the group's first operation.
        wanted: the value of RINGCOMM_GPU_TRANSPORT.
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
    """The algorithm of a collective; print() shows it with the reason.

    Attributes:
        case: the collective, and the facts on which the choice depends.
        choice: the algorithm, the times of all that fit, and why the others do not fit.
    """

    case: Case
    choice: Choice

    def __str__(self) -> str:
        case, choice = self.case, self.choice
        how = f" {case.op}" if case.collective != "allgather" else ""
        how += ", deterministic" if case.is_deterministic else ""
        lines = [
            f"{case.collective} of {bytes_text(case.nbytes)} {case.dtype}{how} on "
            f"{describe(case.nodes)}: {choice.algorithm}, {_because(choice, len(case.nodes))}"
        ]
        width = max(map(len, [*choice.seconds, *choice.unfit]))
        # Estimates are for longer messages, and for ranks that share no memory.
        is_step = choice.why in ("memory", "short")
        times = choice.seconds if choice.is_measured or not is_step else {}
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
    """Return the algorithm that a collective uses, and why; print() shows both. Local.

    Args:
        nbytes: bytes of the whole buffer; for an allgather, bytes of the result.
        dtype: a name ("bfloat16"), or a dtype of numpy or torch.
        collective: "allreduce", "reduce_scatter" or "allgather".
        op: operator of the reduction.
        deterministic: the reduction adds in rank order, as with allreduce(deterministic=True).
        group: the ranks that take part; None: all ranks. This rank need not be a member.
        device: "cpu", or "cuda" for the transport of arrays on GPUs, which the group's first
            operation on them chooses. Before that, "cuda" loads cupy and looks for a GPU.

    Raises:
        TypeError: there is no such dtype, the operator has no meaning for it, or nbytes is no int.
        ValueError: there is no such collective, or nbytes is negative.
        NotInitializedError: init() has not run.
    """
    if collective not in COLLECTIVES:
        raise ValueError(
            f"collective is {collective!r}; it must be one of {', '.join(COLLECTIVES)}"
        )
    if not is_integer(nbytes):
        raise TypeError(f"nbytes is {nbytes!r}; it must be a number of bytes, an int")
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; it must be >= 0")
    for_gpu = is_on_gpu(device)
    current = engine()
    group = current.groups.or_default(group)
    known = _dtype(dtype)
    checked_options(ReductionOptions(op))
    if collective != "allgather":
        op.require(known)
    if for_gpu:
        return _explain_gpu(current, group)
    nodes = group.ranks.nodes
    own = nbytes // group.size if collective == "allgather" else nbytes
    most = most_brought(group.size) if current.transport.runner is not None else 0
    is_short = 0 < most >= own
    case = Case(collective, nbytes, known, nodes, deterministic, group.shares_memory, op, is_short)
    return Explanation(case, current.selection.choice(case))


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
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def _because(choice: Choice, n_ranks: int) -> str:
    reasons = {
        "forced": "as RINGCOMM_ALGORITHM says",
        "measured": "the fastest that `ringcomm tune` measured",
        "estimated": "the fastest by estimate "
        f"(to measure: ringcomm run -np {n_ranks} ringcomm tune)",
        "only": "the only one that can",
        "memory": "because its ranks share their node's memory",
        "short": "as it is short: it goes along with the messages by which the ranks agree",
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
