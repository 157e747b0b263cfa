"""DistributedOptimizer: an existing optimizer whose gradients are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.collectives.operators import AVERAGE, Op
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.torch.compression import Compression, compressor_of
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.horovod.reduce_op import AnyOp, op_of
from ringcomm.torch.optim.adasum import with_adasum
from ringcomm.torch.optim.averaging_optimizer import AveragingOptimizer
from ringcomm.torch.optim.distributed_optimizer_options import (
    GradientOptions,
    checked_passes,
    groups_of,
    require_mean,
    require_own,
)
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import derive, named_in_order

T = TypeVar("T", bound=Optimizer)


def DistributedOptimizer(
    optimizer: T,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: Any = Compression.none,
    backward_passes_per_step: int = 1,
    op: AnyOp = AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.nn.Parameter]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    shard_state: int = 0,
    sync_weights: bool = True,
    on_failure: Literal["raise", "continue"] = "raise",
) -> T:
    """Return `optimizer` with gradients averaged over all ranks when backward() returns.

    The class of the result is a subclass of the optimizer's class. The result shares the state of
    `optimizer`. So state_dict(), param_groups, isinstance() and learning-rate schedulers work as
    before, also schedulers made earlier. The result can be copied and pickled. It also has

    - synchronize(): make .grad final without a step; step() calls it.
    - skip_synchronize(): context in which step() uses .grad as it is.
    - set_samples(n): weight this rank's gradient of this step with n, for example its batch size.
    - set_backward_passes_per_step(n): change backward_passes_per_step, from the next step on.
    - clip_grad_norm_(max_norm): as in torch; also for shard_state=1, where a rank has a part of the
      gradients.

    Every rank must wrap the same parameters in the same order, and call backward() and step() as
    often as the others. A rank may leave parameters unused, or call no backward() for a step: the
    missing gradients count as zeros. A parameter that no rank used keeps .grad None. What a program
    does to .grad or to param_groups counts, or is an error: docs/torch.md has a table.

    Args:
        optimizer: any torch.optim.Optimizer over parameters on the CPU or a CUDA device; closures
            work.
        named_parameters: model.named_parameters(), for error messages. It may name more
            parameters than the optimizer holds.
        compression: how gradients are sent: Compression.none, fp16 or bf16, also as None, "fp16" or
            a codec such as codec.BF16(); or a class with compress() and decompress(), as Horovod's.
        backward_passes_per_step: n: the first n - 1 backward() of a step send nothing; the n-th and
            later ones send the sum of all gradients of the step so far.
        op: Average, Sum or Adasum. With Adasum each rank keeps its own gradients, and the changes
            that step() makes to the weights are combined. Of the arguments below, Adasum allows
            only process_set and sync_weights.
        gradient_predivide_factor: number by which gradients are divided before the reduction and
            multiplied after it, for 16-bit dtypes whose sums would overflow.
        num_groups: number of groups of parameters; each group is one message. 0: buckets of
            RINGCOMM_FUSION_MIB.
        groups: lists of parameters, or the number of lists; each list is one message.
        sparse_as_dense: True: reduce sparse gradients as dense ones. They are sparse again in
            step(), unless shard_state is 1.
        process_set: the ranks that take part; on other ranks the optimizer works alone.
        shard_state: 1: each rank keeps the optimizer's state for its share of the parameters, and
            updates that share (ZeRO-1). The results stay the same. .grad is this rank's part of the
            mean, and zero elsewhere; state_dict() is collective. See docs/sharded_optimizer.md and
            ringcomm.torch.zero.sharded_optimizer.ShardedOptimizer.
        sync_weights: True: in the first backward(), ranks compare a fingerprint of their
            parameters, frozen ones too. If they differ, all ranks get the first rank's parameters,
            with a warning. Frozen parameters that named_parameters names but the optimizer does not
            hold stay as they are, with a warning. To send buffers, too, call
            hvd.broadcast_parameters(model.state_dict()) first. False: ranks may have different
            weights.
        on_failure: "raise": backward() and step() raise PeerFailedError if a rank is lost.
            "continue", in an elastic job: they do not, and the ranks that are left go on. One step
            is lost: step() makes no update on any of them, .grad is zero after backward(), and
            the micro-batches of all ranks are not trained on. Every other step is applied on all
            ranks that are left: if only some of them had its mean before the failure, the others
            get their weights and optimizer state, but not what else follows from a step, such as
            buffers or settings in param_groups. Later means are over the ranks that are left.
            Nothing gives them the samples of lost ranks. Other operations of the program, such as
            an allreduce of a metric, raise PeerFailedError as ever; and if a rank is lost in the
            last step, a rank that has ended cannot give its weights to the others. step() takes no
            closure. elastic.run avoids all that, and within it on_failure has no effect: see
            docs/elastic.md.

    Raises:
        NotInitializedError: init() has not run.
        TypeError: a parameter is on a device of another type, or its dtype cannot be reduced;
            compression is no compressor; or shard_state is 1 and the optimizer is not known to
            update each element by itself.
        ValueError: named_parameters has no names, or they are not unique; a parameter of the
            optimizer has no name or belongs to another DistributedOptimizer; a parameter in groups
            is not the optimizer's; or an argument is out of range.

    backward() and step() raise MismatchError (on every rank), PeerFailedError and CommTimeoutError.
    After a backward() that failed they raise RingcommError until zero_grad() is called.

    Cost: memory for the buckets, as large as the gradients; one copy of each gradient. backward()
    sends 2 (size - 1) / size of the gradients' bytes while it runs, and at its end one message of a
    byte per parameter. With shard_state=1, backward() sends half of that, and step() the other
    half. N ranks with batches of b get the results of one process with a batch of N * b, up to
    rounding.
    """
    if isinstance(optimizer, AveragingOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"DistributedOptimizer wraps an optimizer of torch, not {type(optimizer).__name__}"
        )
    ProcessSet.require(process_set)
    if on_failure not in ("raise", "continue"):
        raise ValueError(f'on_failure is "raise" or "continue", not {on_failure!r}')
    engine()
    given = None if named_parameters is None else list(named_parameters)
    named = named_in_order(optimizer, given)
    op, compressor = op_of(op, None), compressor_of("DistributedOptimizer", compression)
    if isinstance(op, Op):
        options = GradientOptions(
            op,
            compressor,
            float(gradient_predivide_factor),
            groups_of(groups, num_groups),
            sparse_as_dense,
            process_set,
            shard_state,
            sync_weights,
        )
        require_own(options, named, given or ())
        part = AveragingOptimizer
        if options.is_sharded:
            from ringcomm.torch.zero.sharded_optimizer import ShardedOptimizer as part
            from ringcomm.torch.zero.sharded_optimizer import require_elementwise

            require_elementwise(optimizer)
        if on_failure == "continue":
            from ringcomm.torch.elastic.on_failure_continue import with_continuation

            passes = backward_passes_per_step
            return with_continuation(optimizer, named, options, passes, given or ())
        reducer = GradientReducer(named, options, backward_passes_per_step, given or ())
        return derive(optimizer, part, _reducer=reducer)
    if on_failure == "continue":
        raise ValueError('on_failure="continue" does not go with op=hvd.Adasum: use elastic.run')
    if shard_state:
        raise ValueError("op=hvd.Adasum combines updates of whole tensors: it needs shard_state=0")
    require_mean(gradient_predivide_factor, op)
    checked_passes(backward_passes_per_step)
    return with_adasum(
        optimizer, named, compressor, process_set, sync_weights=sync_weights, known=given or ()
    )
