"""dist.ProcessGroup over ringcomm: c10d's methods, translated into operations of the engine.

Each process group has its own group of the engine, in which operations match by their order.
Operations of other groups, and of ringcomm's own functions, do not affect that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ringcomm.engine.api.point_to_point import irecv, irecv_elements, isend
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.plan import Plan
from ringcomm.engine.executors.short_calls import short_calls_of
from ringcomm.engine.operations.barrier import plan_barrier
from ringcomm.engine.operations.grouped import plan_grouped
from ringcomm.errors import CommTimeoutError
from ringcomm.torch.distributed.compat import c10d, traced
from ringcomm.torch.distributed.group import collectives
from ringcomm.torch.distributed.group.arguments import (
    CallOptions,
    call_options,
    one_list,
    one_tensor,
)
from ringcomm.torch.distributed.group.base import BaseGroup
from ringcomm.torch.distributed.group.device_backends import carries, is_foreign
from ringcomm.torch.distributed.group.flat_tensors import (
    bytes_of,
    concatenate,
    flatten,
    is_shared,
    line_for,
    write_parts,
)
from ringcomm.torch.distributed.group.work import Work
from ringcomm.transport.base import ANY_SOURCE

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


def _are_alike(xs: Tensors, like: Tensor, size: int) -> bool:
    """Return True if xs are `size` contiguous tensors in host memory, as large as another one."""
    n, dtype = like.numel(), like.dtype
    return len(xs) == size and all(
        x.is_cpu and x.numel() == n and x.dtype == dtype and x.is_contiguous() for x in xs
    )


def _are_even(x: Tensor, out: Tensor, size: int) -> bool:
    """Return True if each rank sends as many rows of x to each as it gets."""
    is_alike = x.numel() == out.numel() and x.dtype == out.dtype
    return is_alike and all((each.shape[0] if each.dim() else 1) % size == 0 for each in (x, out))


class ProcessGroup(BaseGroup):
    """A process group on tensors of CPUs and GPUs; torch's own backends handle other devices.

    init_process_group("ringcomm") and new_group() make it. Its methods have c10d's names, and take
    c10d's arguments, as an options object or in the short form. Operations of one group match in
    the order of the calls. If threads call in different orders on different ranks, calls that
    differ raise MismatchError.

    Args:
        store: a store of torch.distributed, for backends of other devices.
        group: the engine's group of the ranks.
        timeout_s: deadline of each operation, in seconds; None: RINGCOMM_TIMEOUT_S.
    """

    # --- reductions -----------------------------------------------------------------------------
    @traced
    def allreduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Replace a tensor by its reduction over all ranks; a sparse tensor stays sparse."""
        (x,) = tensors = one_tensor(tensors)
        if is_foreign(self, x):
            return self._devices.of(x).allreduce(tensors, opts or c10d.AllreduceOptions())
        call = call_options(opts, *more, **named)
        if x.layout is not torch.strided:
            plan = collectives.allreduce_sparse
            return self.start(call, "allreduce", tensors, plan, x, call.reduction)
        op = collectives.scaled_(x, call.reduction)
        line = flatten(x)
        if run := self._short(call, (x, line)):
            run("allreduce_", line, op)
            return Work(None, tensors)
        work = self.start(call, "allreduce", tensors, collectives.allreduce, x, line, op)
        return work.outlives_its_caller() if call.is_async and x.numel() == 1 else work

    def _short(
        self, call: CallOptions, *tensors: tuple[Tensor, Tensor]
    ) -> Callable[..., Any] | None:
        """Return what makes short calls if `call` can be one on tensors, given with their lines."""
        if call.is_async or self._needs_engine:
            return None
        for x, line in tensors:
            if not x.is_cpu or (line is not x and line.data_ptr() != x.data_ptr()):
                return None
        calls = short_calls_of(self.group)
        if calls is None:
            return None
        return partial(calls.run, timeout_s=call.timeout_s or self._timeout_s)

    @traced
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Replace each tensor by its reduction, in one operation."""
        if is_foreign(self, *tensors):
            return self._devices.of(*tensors).allreduce_coalesced(tensors, opts)
        call, plan = call_options(opts), collectives.allreduce_all
        return self.start(call, "allreduce", tensors, plan, tensors, call.reduction)

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        """Replace a sparse tensor by its reduction over all ranks."""
        return self.allreduce(tensors, opts)

    @traced
    def reduce(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Replace the root's tensor by the reduction; other ranks' tensors keep their values."""
        (x,) = tensors = one_tensor(tensors)
        if is_foreign(self, x):
            return self._devices.of(x).reduce(tensors, opts)
        call, plan = call_options(opts, *more, **named), collectives.reduce
        line, (op, factor) = flatten(x), call.reduction
        if factor is None and (run := self._short(call, (x, line))):
            run("reduce_", line, op, call.root)
            return Work(None, tensors)
        return self.start(call, "reduce", tensors, plan, x, call.reduction, call.root)

    @traced
    def reduce_scatter(
        self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Fill the output with the reduction of the inputs that all ranks pass for this rank."""
        (out,), parts = one_tensor(outputs), one_list(inputs)
        if is_foreign(self, out):
            return self._devices.of(out).reduce_scatter([out], [parts], opts)
        call, plan = call_options(opts, *more, **named), collectives.reduce_scatter
        return self.start(call, "reduce_scatter", [out], plan, out, parts, call.reduction)

    @traced
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill `output` with this rank's part of the reduction of all ranks' inputs."""
        if is_foreign(self, output):
            return self._devices.of(output)._reduce_scatter_base(output, input, opts)
        call, plan = call_options(opts), collectives.reduce_scatter_single
        line, target, (op, factor) = flatten(input), flatten(output), call.reduction
        if factor is None and (run := self._short(call, (input, line), (output, target))):
            run("reduce_scatter_into", line, op, into=target)
            return Work(None, [output])
        return self.start(call, "reduce_scatter", [output], plan, output, input, call.reduction)

    @traced
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Run reduce_scatter_single() for several pairs of tensors, in one operation."""
        if is_foreign(self, *outputs):
            other = self._devices.of(*outputs)
            return other.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        call = call_options(opts)

        def plan(g: Group) -> Plan[Any]:
            each = [
                collectives.reduce_scatter_single(g, out, x, call.reduction)
                for out, x in zip(outputs, inputs, strict=True)
            ]
            return plan_grouped("grouped_reduce_scatter", None, each)

        return self.start(call, "reduce_scatter", outputs, plan)

    # --- copies ---------------------------------------------------------------------------------
    @traced
    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Replace a tensor by the root's tensor."""
        (x,) = tensors = one_tensor(tensors)
        if is_foreign(self, x):
            return self._devices.of(x).broadcast(tensors, opts)
        call, line = call_options(opts, *more, **named), flatten(x)
        if run := self._short(call, (x, line)):
            run("broadcast_", bytes_of(line), None, call.root)
            return Work(None, tensors)
        return self.start(call, "broadcast", tensors, collectives.broadcast, x, call.root)

    @traced
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Fill the r-th output with rank r's input; ranks may pass inputs of different sizes."""
        outs, (x,) = one_list(outputs), one_tensor(inputs)
        if is_foreign(self, x):
            return self._devices.of(x).allgather([outs], [x], opts)
        call, line = call_options(opts, *more, **named), flatten(x)
        whole = line_for(outs)
        if _are_alike(outs, x, self.size()) and (run := self._short(call, (x, line))):
            run("allgather_into", bytes_of(line), into=bytes_of(whole))
            write_parts(outs, whole)
            work = Work(None, outs)
        else:
            work = self.start(call, "allgather", outs, collectives.allgather, outs, x, whole)
        if whole.numel() == x.numel() * len(outs):
            work.value = [whole.view(len(outs), *x.shape)]
        return work

    @traced
    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:
        """Fill outputs[r][i] with rank r's i-th input."""
        if is_foreign(self, *inputs):
            return self._devices.of(*inputs).allgather_coalesced(outputs, inputs, opts)

        def plan(g: Group) -> Plan[Any]:
            collectives.require_one_each("output_tensor_lists", outputs, g.size)
            by_input = [[outs[i] for outs in outputs] for i in range(len(inputs))]
            each = [
                collectives.allgather(g, outs, x, line_for(outs))
                for outs, x in zip(by_input, inputs, strict=True)
            ]
            return plan_grouped("grouped_allgather", None, each)

        flat = [out for outs in outputs for out in outs]
        return self.start(call_options(opts), "allgather", flat, plan)

    @traced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill `output` with all ranks' inputs; `input` may be this rank's part of `output`."""
        if is_foreign(self, output):
            return self._devices.of(output)._allgather_base(output, input, opts)
        call, plan = call_options(opts), collectives.allgather_single
        line, target = flatten(input), flatten(output)
        if run := self._short(call, (input, line), (output, target)):
            run("allgather_into", bytes_of(line), into=bytes_of(target))
            return Work(None, [output])
        return self.start(call, "allgather", [output], plan, output, input)

    @traced
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Run all_gather_single() for several pairs of tensors, in one operation."""
        if is_foreign(self, *outputs):
            other = self._devices.of(*outputs)
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)

        def plan(g: Group) -> Plan[Any]:
            pairs = zip(outputs, inputs, strict=True)
            each = [collectives.allgather_single(g, out, x) for out, x in pairs]
            return plan_grouped("grouped_allgather", None, each)

        return self.start(call_options(opts), "allgather", outputs, plan)

    @traced
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Fill the root's r-th output with rank r's input."""
        (x,) = one_tensor(inputs)
        if is_foreign(self, x):
            return self._devices.of(x).gather(outputs, inputs, opts)
        call = call_options(opts, *more, **named)
        is_root, root, line = self.rank() == call.root, call.root, flatten(x)
        outs = one_list(outputs) if is_root else []
        is_short = not is_root or _are_alike(outs, x, self.size())
        if is_short and (run := self._short(call, (x, line))):
            line, none_due = bytes_of(line), (0,) * self.size()
            if not is_root:
                run("gather_into", line, None, root, more=none_due)
            else:
                whole, due = line_for(outs), (line.numel(),) * self.size()
                run("gather_into", line, None, root, into=bytes_of(whole), more=due)
                write_parts(outs, whole)
            return Work(None, outs)
        return self.start(call, "gather", outs, collectives.gather, outs, x, root)

    @traced
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Fill the output with the root's input for this rank."""
        (out,) = one_tensor(outputs)
        if is_foreign(self, out):
            return self._devices.of(out).scatter(outputs, inputs, opts)
        call = call_options(opts, *more, **named)
        is_root, root, target = self.rank() == call.root, call.root, flatten(out)
        parts = one_list(inputs) if is_root else []
        is_short = not is_root or _are_alike(parts, out, self.size())
        if is_short and (run := self._short(call, (out, target))):
            into = bytes_of(target)
            rows = bytes_of(concatenate(parts)).view(self.size(), into.numel()) if is_root else None
            if rows is None or not is_shared(rows, into):
                run("scatter_into", rows, None, root, into=into, more=collectives.due_of(out))
                return Work(None, [out])
        return self.start(call, "scatter", [out], collectives.scatter, out, parts, root)

    @traced
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
        **named: Any,
    ) -> Any:
        """Send rows of `input` to each rank, and fill `output`; empty splits mean equal splits."""
        if is_foreign(self, output):
            other = self._devices.of(output)
            return other.alltoall_base(output, input, output_splits, input_splits, opts)
        call, plan = call_options(opts, **named), collectives.alltoall_single
        splits = output_splits, input_splits
        line, target = flatten(input), flatten(output)
        is_even = collectives.are_even(splits) and _are_even(input, output, self.size())
        if is_even and (run := self._short(call, (input, line), (output, target))):
            x, into = bytes_of(line), bytes_of(target)
            each = (x.numel() // self.size(),) * self.size()
            run("alltoall_into", x, into=into, more=(each, each))
            return Work(None, [output])
        return self.start(call, "alltoall", [output], plan, output, input, *splits)

    @traced
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **named: Any) -> Any:
        """Send the r-th input to rank r, and fill the r-th output with the tensor from rank r."""
        if is_foreign(self, *outputs):
            return self._devices.of(*outputs).alltoall(outputs, inputs, opts)
        call, plan, size = call_options(opts, **named), collectives.alltoall, self.size()
        is_even = outputs and _are_alike(inputs, outputs[0], size)
        if is_even and _are_alike(outputs, inputs[0], size) and (run := self._short(call)):
            line = concatenate(inputs)
            whole, x = line_for(outputs, line), bytes_of(line)
            each = (x.numel() // size,) * size
            run("alltoall_into", x, into=bytes_of(whole), more=(each, each))
            write_parts(outputs, whole)
            return Work(None, outputs)
        return self.start(call, "alltoall", outputs, plan, outputs, inputs)

    @traced
    def barrier(self, opts: Any = None, **named: Any) -> Any:
        """Return when every rank has called it."""
        if getattr(opts, "device_ids", None) and not carries(self, "cuda"):
            return self._devices.by_type(torch.accelerator.current_accelerator()).barrier(opts)
        call = call_options(opts, **named)
        if run := self._short(call):
            run("barrier")
            return Work(None, [])
        return self.start(call, "barrier", [], plan_barrier, None)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it; the error names all ranks that have not.

        `wait_all_ranks` is ignored.

        Raises:
            CommTimeoutError: ranks have not called within `timeout`; `missing` holds their numbers.
        """
        del wait_all_ranks
        work = self.start(call_options(None), "barrier", [], plan_barrier, None)
        try:
            work.wait(timedelta(seconds=self._timeout_s or 0) if timeout is None else timeout)
        except CommTimeoutError as error:
            raise CommTimeoutError(f"monitored_barrier: {error}", missing=error.missing) from error

    # --- from rank to rank ----------------------------------------------------------------------
    @traced
    def send(self, tensors: Any, dest: int, tag: int = 0) -> Any:
        """Send a tensor to a rank, which may be this rank."""
        (x,) = one_tensor(tensors)
        if is_foreign(self, x):
            return self._devices.of(x).send([x], dest, tag)
        line = bytes_of(flatten(x))
        return self._collected(Work(isend(line, dest, **self._message(tag)), [x]))

    @traced
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Fill a tensor with the elements that a rank sends."""
        (out,) = one_tensor(tensors)
        if is_foreign(self, out):
            return self._devices.of(out).recv([out], source, tag)
        if out.is_contiguous():
            handle = irecv(bytes_of(flatten(out)), source, **self._message(tag))
        else:
            handle = irecv_elements(out, source, **self._message(tag))
        return self._collected(Work(handle, [out]))

    @traced
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Fill a tensor with the elements that any rank sends; Work._source_rank() names it."""
        return self.recv(tensors, ANY_SOURCE, tag)

    def _message(self, tag: int) -> dict[str, Any]:
        self._require_open()
        return {"tag": tag, "group": self.group, "timeout_s": self._timeout_s}

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> ProcessGroup | None:
        """Return a process group of some ranks of this group; None on a rank that is no member.

        The members call it. Unlike dist.split_group(), it does not tell torch of the group.

        Args:
            new_ranks: the members, as ranks of this group.
            timeout: deadline of each operation of the new group; None: the deadline of this group.
            opts: ignored.
            group_name: name of the new group.
            group_desc: description of the new group.
        """
        del opts
        if self.rank() not in new_ranks:
            return None
        group = Group.of_job([self.group.ranks[rank] for rank in new_ranks])
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        name = group_name or f"{self.group_name}/{'_'.join(map(str, new_ranks))}"
        made = ProcessGroup(c10d.PrefixStore(f"{name}/", self._store), group, timeout_s)
        made._set_group_name(name)
        made._set_group_desc(group_desc or "split")
        return made

    # Names that torch uses up to 2.12, and warns of from 2.13 on.
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
