"""dist.ProcessGroup over ringcomm: c10d's methods, translated into operations of the engine.

One group of the engine per process group: operations match by their order in it, and messages of
other groups, and of ringcomm's own functions, pass beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ringcomm.engine.api.point_to_point import recv_async, send_async
from ringcomm.engine.core.execution import Plan
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.errors import CommTimeoutError
from ringcomm.torch.distributed.compat import c10d, traced
from ringcomm.torch.distributed.group import collectives
from ringcomm.torch.distributed.group.flatten import bytes_of, flatten
from ringcomm.torch.distributed.group.options import are_local, call_options, one_list, one_tensor
from ringcomm.torch.distributed.group.reductions import ReducingGroup
from ringcomm.torch.distributed.group.work import Work
from ringcomm.transport.base import ANY_SOURCE

Tensor = torch.Tensor
Tensors = Sequence[Tensor]


class ProcessGroup(ReducingGroup):
    """A process group on CPU tensors; those of other devices go to torch's backend for them.

    Made by init_process_group("ringcomm") and new_group(). Its methods have c10d's names and
    arguments, options objects and short forms. Operations take part in the order in which they are
    called; threads that call on one group in different orders on different ranks get a
    MismatchError where the calls differ.

    Args:
        store: of torch.distributed, for other backends.
        group: the ranks.
        timeout_s: deadline of each operation, in seconds; None: RINGCOMM_TIMEOUT_S.
    """

    # --- copies ---------------------------------------------------------------------------------
    @traced
    def broadcast(self, tensors: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Replace the tensor by the root's."""
        (x,) = tensors = one_tensor(tensors)
        if not x.is_cpu:
            return self._devices.of(x).broadcast(tensors, opts)
        call = call_options(opts, *more, **named)
        return self.start(call, "broadcast", tensors, collectives.broadcast, x, call.root)

    @traced
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any
    ) -> Any:
        """Fill the r-th output with rank r's input; they may differ in size."""
        outs, (x,) = one_list(outputs), one_tensor(inputs)
        if not x.is_cpu:
            return self._devices.of(x).allgather([outs], [x], opts)
        call = call_options(opts, *more, **named)
        whole = collectives.room_for(outs)
        work = self.start(call, "allgather", outs, collectives.allgather, outs, x, whole)
        if whole.numel() == x.numel() * len(outs):
            work.value = [whole.view(len(outs), *x.shape)]
        return work

    @traced
    def allgather_coalesced(self, outputs: Any, inputs: Tensors, opts: Any = None) -> Any:
        """Fill outputs[r][i] with rank r's i-th input."""
        if not are_local(inputs):
            return self._devices.of(*inputs).allgather_coalesced(outputs, inputs, opts)

        def plan(g: Group) -> Plan[Any]:
            collectives.require_one_each("output_tensor_lists", outputs, g.size)
            by_input = [[outs[i] for outs in outputs] for i in range(len(inputs))]
            pairs = zip(by_input, inputs, strict=True)
            each = [
                collectives.allgather(g, outs, x, collectives.room_for(outs)) for outs, x in pairs
            ]
            return collectives.grouped("grouped_allgather", each)

        flat = [out for outs in outputs for out in outs]
        return self.start(call_options(opts), "allgather", flat, plan)

    @traced
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        """Fill `output` with the inputs of all ranks; `input` may be its own part of it."""
        if not output.is_cpu:
            return self._devices.of(output)._allgather_base(output, input, opts)
        call, plan = call_options(opts), collectives.allgather_single
        return self.start(call, "allgather", [output], plan, output, input)

    @traced
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Several all_gather_single() as one."""
        if not are_local(outputs):
            other = self._devices.of(*outputs)
            return other.allgather_into_tensor_coalesced(outputs, inputs, opts)

        def plan(g: Group) -> Plan[Any]:
            pairs = zip(outputs, inputs, strict=True)
            each = [collectives.allgather_single(g, out, x) for out, x in pairs]
            return collectives.grouped("grouped_allgather", each)

        return self.start(call_options(opts), "allgather", outputs, plan)

    @traced
    def gather(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Fill the root's r-th output with rank r's input."""
        (x,) = one_tensor(inputs)
        if not x.is_cpu:
            return self._devices.of(x).gather(outputs, inputs, opts)
        call = call_options(opts, *more, **named)
        outs = one_list(outputs) if self.rank() == call.root else []
        return self.start(call, "gather", outs, collectives.gather, outs, x, call.root)

    @traced
    def scatter(self, outputs: Any, inputs: Any, opts: Any = None, *more: Any, **named: Any) -> Any:
        """Fill the output with the root's input for this rank."""
        (out,) = one_tensor(outputs)
        if not out.is_cpu:
            return self._devices.of(out).scatter(outputs, inputs, opts)
        call = call_options(opts, *more, **named)
        parts = one_list(inputs) if self.rank() == call.root else []
        return self.start(call, "scatter", [out], collectives.scatter, out, parts, call.root)

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
        """Send rows of `input` to each rank; without splits as many to each."""
        if not output.is_cpu:
            other = self._devices.of(output)
            return other.alltoall_base(output, input, output_splits, input_splits, opts)
        call, plan = call_options(opts, **named), collectives.alltoall_single
        splits = output_splits, input_splits
        return self.start(call, "alltoall", [output], plan, output, input, *splits)

    @traced
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None, **named: Any) -> Any:
        """Send the r-th input to rank r, and fill the r-th output with what it sent."""
        if not are_local(outputs):
            return self._devices.of(*outputs).alltoall(outputs, inputs, opts)
        call, plan = call_options(opts, **named), collectives.alltoall
        return self.start(call, "alltoall", outputs, plan, outputs, inputs)

    @traced
    def barrier(self, opts: Any = None, **named: Any) -> Any:
        """Return when every rank has called it."""
        if getattr(opts, "device_ids", None):
            return self._devices.by_type(torch.accelerator.current_accelerator()).barrier(opts)
        return self.start(call_options(opts, **named), "barrier", [], collectives.barrier)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when every rank has called it, or name those that have not.

        dist.monitored_barrier() refuses every backend but gloo: call this one. All missing ranks
        are named whatever `wait_all_ranks` says.

        Raises:
            CommTimeoutError: some have not within `timeout`; its `missing` are their ranks.
        """
        del wait_all_ranks
        work = self.start(call_options(None), "barrier", [], collectives.barrier)
        try:
            work.wait(timedelta(seconds=self._timeout_s or 0) if timeout is None else timeout)
        except CommTimeoutError as error:
            raise CommTimeoutError(f"monitored_barrier: {error}", missing=error.missing) from error

    # --- from rank to rank ----------------------------------------------------------------------
    @traced
    def send(self, tensors: Any, dest: int, tag: int = 0) -> Any:
        """Send a tensor to another rank, or this one."""
        (x,) = one_tensor(tensors)
        if not x.is_cpu:
            return self._devices.of(x).send([x], dest, tag)
        line = bytes_of(flatten(x))
        return self._sent(send_async(line, dest, **self._message(tag)), [x])

    @traced
    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Fill a tensor with what a rank sends."""
        (out,) = one_tensor(tensors)
        if not out.is_cpu:
            return self._devices.of(out).recv([out], source, tag)
        target = bytes_of(flatten(out)) if out.is_contiguous() else out
        return self._sent(recv_async(target, source, **self._message(tag)), [out])

    @traced
    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        """Fill a tensor with what any rank sends; Work._source_rank() tells which one did."""
        return self.recv(tensors, ANY_SOURCE, tag)

    def _message(self, tag: int) -> dict[str, Any]:
        self._require_open()
        return {"tag": tag, "group": self.group, "timeout_s": self._timeout_s, "by_count": True}

    def _sent(self, handle: Handle[Any], tensors: Tensors) -> Work:
        return self._noted(Work(handle, tensors))

    def split_group(
        self,
        new_ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **_: Any,
    ) -> ProcessGroup | None:
        """Return a process group of some of these ranks, None on the others; its members call it.

        dist.split_group() refuses all but NCCL: call this one.

        Args:
            new_ranks: ranks of this group.
            timeout: of the new one's operations; None: as here.
            opts: unused.
            group_name: of the new one.
            group_desc: of the new one.
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

    # torch calls them so up to 2.12, and warns of these names from 2.13 on.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    alltoall_base = all_to_all_single
