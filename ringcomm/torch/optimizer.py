"""DistributedOptimizer: an existing optimizer whose gradients are averaged over all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from ringcomm.collectives.op import AVERAGE, Op
from ringcomm.engine.api.world import engine
from ringcomm.torch.compression import Compression
from ringcomm.torch.horovod.process_sets import ProcessSet, global_process_set
from ringcomm.torch.horovod.reduce_op import AnyOp, op_of
from ringcomm.torch.optim.adasum import with_adasum
from ringcomm.torch.optim.averaging import AveragingOptimizer, with_averaging
from ringcomm.torch.optim.options import (
    GradientOptions,
    groups_of,
    require_mean,
    require_own,
    require_passes,
)
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import named_in_order

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
) -> T:
    """Return `optimizer` with gradients averaged over all ranks when backward() returns.

    The result is of a subclass of the optimizer's own class and shares its state, so learning-rate
    schedulers, state_dict(), param_groups and isinstance() work as before, also for a scheduler
    that was made earlier. It can be copied and pickled. It also has

    - synchronize(): see .grad final without a step; step() does it by itself.
    - skip_synchronize(): context in which step() uses .grad as it is.
    - set_samples(n): weigh this rank's gradient of this step by n, e.g. its batch size.
    - set_backward_passes_per_step(n): from the next step on.
    - clip_grad_norm_(max_norm): torch's, also right where ranks have parts of the gradients.

    Every rank must wrap the same parameters in the same order, and run as many backward() and
    step() as the others. A rank may leave parameters out, or have no backward() for a step: what is
    missing counts as zeros. A parameter that no rank used keeps .grad None. .grad is a view of
    memory that the next backward() overwrites: clone what is to be kept.

    Args:
        optimizer: any torch.optim.Optimizer over parameters on the CPU or a CUDA device; closures
            work.
        named_parameters: model.named_parameters(), for error messages. It may name more
            parameters than the optimizer holds.
        compression: what is sent: Compression.none, fp16 or bf16.
        backward_passes_per_step: the first n - 1 backward() of a step send nothing; the n-th sends
            the sum of what all have computed, and so do any that follow.
        op: Average or Sum. Adasum: gradients stay each rank's own, and what step() adds to the
            weights is combined; of the arguments that follow it takes process_set and
            sync_weights alone.
        gradient_predivide_factor: gradients are divided by it before they are sent and multiplied
            after, for 16-bit dtypes whose sums would overflow.
        num_groups: this many groups of parameters travel as one message each; 0: buckets of
            RINGCOMM_FUSION_MIB.
        groups: lists of parameters that travel as one message each, or their number.
        sparse_as_dense: sparse gradients are reduced as dense ones. step() sees them sparse again,
            but for shard_state=1.
        process_set: the ranks that take part; on others the optimizer works alone.
        shard_state: 1: each rank keeps the state of its share of the parameters alone, and updates
            that (ZeRO-1). It changes no result, but .grad is this rank's part of the mean, and zero
            elsewhere; state_dict() is collective. See docs/sharded_optimizer.md, and
            ringcomm.torch.zero.sharding.ShardedOptimizer.
        sync_weights: in the first backward() ranks compare a fingerprint of their parameters,
            frozen ones too, and where they differ all have those of the first rank at its end, and
            a warning says so. Frozen ones of named_parameters that the optimizer does not hold are
            compared, and a warning tells that they differ, but they are left as they are. What
            makes all alike before is hvd.broadcast_parameters(model.state_dict()), which sends
            buffers, too. False: ranks mean to have different weights.

    Raises:
        NotInitializedError: init() has not run.
        TypeError: a parameter is on another device, or of a dtype that cannot be reduced, or
            shard_state=1 with an optimizer that is not known to go by element.
        ValueError: named_parameters has no names, or they are not unique, a parameter of the
            optimizer has none or belongs to another DistributedOptimizer, one in groups is not the
            optimizer's, or an argument is out of range.

    backward() and step() then raise MismatchError (on every rank), PeerFailedError and
    CommTimeoutError; and RingcommError after a backward() that failed, until zero_grad().

    Cost: the buckets, as large as the gradients; one copy of each gradient; per backward()
    2 (size - 1) / size of their bytes sent while it runs, and at its end one message of a byte per
    parameter; with shard_state=1 half of that, and as much again in step(). The sum over ranks of N
    batches of b equals one process with a batch of N * b as far as floating point allows.
    """
    if isinstance(optimizer, AveragingOptimizer):
        raise ValueError("the optimizer is a DistributedOptimizer already: wrap it once")
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"DistributedOptimizer wraps an optimizer of torch, not {type(optimizer).__name__}"
        )
    ProcessSet.require(process_set)
    engine()
    given = None if named_parameters is None else list(named_parameters)
    named = named_in_order(optimizer, given)
    op = op_of(op, None)
    if isinstance(op, Op):
        options = GradientOptions(
            op,
            compression,
            float(gradient_predivide_factor),
            groups_of(groups, num_groups),
            sparse_as_dense,
            process_set,
            shard_state,
            sync_weights,
        )
        require_own(options, named, given or ())
        wrap = with_averaging
        if options.is_sharded:
            from ringcomm.torch.zero.elementwise import require_elementwise
            from ringcomm.torch.zero.sharding import with_sharding as wrap

            require_elementwise(optimizer)
        reducer = GradientReducer(named, options, backward_passes_per_step, given or ())
        return wrap(optimizer, reducer)
    if shard_state:
        raise ValueError("op=hvd.Adasum combines what whole steps add: it needs shard_state=0")
    require_mean(gradient_predivide_factor, op)
    require_passes(backward_passes_per_step)
    return with_adasum(
        optimizer, named, compression, process_set, sync_weights=sync_weights, known=given or ()
    )
