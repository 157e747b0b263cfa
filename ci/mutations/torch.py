"""Faults of the API for torch."""

from mutations.mutation import Mutation

OPTIMIZER = [
    Mutation(
        "unused-keeps-last-step",
        "optimizer",
        "torch/optim/gradient_slot.py",
        """\
        if gradient is None or not code & DENSE:
            self._view.zero_()""",
        """\
        if gradient is None or not code & DENSE:""",
        "a parameter that a rank does not use counts with what its bucket held a step ago",
        ("with_torch/test_any_use_of_parameters_equals_one_process.py",),
    ),
    Mutation(
        "empty-batch-times-zero",
        "optimizer",
        "torch/optim/buckets.py",
        "return wire.mul_(weight) if weight else wire.zero_()",
        "return wire.mul_(weight)",
        "set_samples(0) for an empty batch, whose mean is NaN, makes every rank's gradient NaN",
        ("with_torch/test_unequal_batches.py",),
    ),
    Mutation(
        "weighed-in-16-bits",
        "optimizer",
        "torch/optim/buckets.py",
        "if self.buffer.dtype in _16_BIT:",
        "if self.buffer.dtype is torch.bfloat16:",
        "float16 gradients overflow when they are weighed by the number of samples",
        ("with_torch/test_unequal_batches.py",),
    ),
    Mutation(
        "samples-beyond-the-unit",
        "optimizer",
        "torch/optim/finish_backward.py",
        "if problem is None and presence.flags & EXCEEDS_UNIT:",
        "if problem is None and presence.flags & EXCEEDS_UNIT and not self.scaling.unit:",
        "compressed gradients overflow in steps with more samples than any before",
        ("with_torch/test_weighted_means_in_16_bits.py",),
    ),
    Mutation(
        "own-ready-order",
        "optimizer",
        "torch/optim/buckets_in_order_of_readiness.py",
        """\
            yield handle
            self._order = handle.wait()[0].tolist()""",
        """\
            yield handle
            self._order = mine.tolist()""",
        "ranks whose gradients become ready in another order plan other buckets, and mismatch",
        ("with_torch/test_buckets_during_backward.py",),
    ),
    Mutation(
        "kept-gradient-is-not-copied",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "if is_seen or self.is_in_bucket:",
        "if is_seen:",
        "gradients that are not zeroed between steps are overwritten instead of added to",
        ("with_torch/test_any_use_of_grad.py",),
    ),
    Mutation(
        "number-of-optimizers",
        "optimizer",
        "torch/backward/optimizer_numbers_and_sample_weights.py",
        "number = _counts.get(group, 0) + 1",
        "number = min(_counts.get(group, 0) + 1, 2)",
        "once an optimizer was dropped, two others take each other's messages",
        ("with_torch/test_buckets_during_backward.py",),
    ),
    Mutation(
        "late-in-the-bucket",
        "optimizer",
        "torch/optim/gradient_slot.py",
        """\
            self.parameter.grad = None
        else:
            self._sent = packed.detach().clone()""",
        """\
            pass
        else:
            self._sent = packed.detach().clone()""",
        "what a second loss adds goes into a bucket that is under way, and counts twice or not",
        ("with_torch/test_any_use_of_parameters_equals_one_process.py",),
    ),
    Mutation(
        "samples-for-ever",
        "optimizer",
        "torch/optim/reducer.py",
        """\
        self._n_attempts = 0
        self.samples = None""",
        """\
        self._n_attempts = 0""",
        "the number of samples of one step weighs the next one, too",
        ("with_torch/test_unequal_batches.py",),
    ),
    Mutation(
        "added-weights-uncompared",
        "optimizer",
        "torch/optim/reducer.py",
        """\
        self._agreement.weights.expect_more()
        self.plan.forget_sparse()
        self._replan()
        self._attach_hooks()""",
        """\
        self.plan.forget_sparse()
        self._replan()
        self._attach_hooks()""",
        "parameters that are added between steps begin with other values on each rank, unnoticed",
        ("with_torch/test_equal_first_weights.py",),
    ),
]

_PROGRAMS = ("with_torch/test_random_gradient_programs.py",)

CHANGES = [
    Mutation(
        "hooks-run-after-packing",
        "optimizer",
        "torch/backward/autograd_hooks.py",
        "if len(hooks) > 1 and index not in others:",
        "if len(hooks) > 9 and index not in others:",
        "what a hook registered after wrapping writes through .data is lost",
        _PROGRAMS,
    ),
    Mutation(
        "gradients-set-by-hand-stay-local",
        "optimizer",
        "torch/optim/finish_backward.py",
        "elif slot.has_own_gradient:",
        "elif slot.has_own_gradient and slot.has_sparse:",
        "each rank steps with the gradients that its program has set",
        _PROGRAMS,
    ),
    Mutation(
        "gradients-set-after-backward-stay-local",
        "optimizer",
        "torch/optim/reducer.py",
        "not slot.history.is_final and slot.has_own_gradient for slot in self.slots",
        "slot.history.is_final and slot.has_own_gradient for slot in self.slots",
        "a gradient set by hand after backward() is not reduced",
        _PROGRAMS,
    ),
    Mutation(
        "exchanged-parameters-stay-local",
        "optimizer",
        "torch/optim/averaging_optimizer.py",
        "if self._has_strangers:",
        "if self._has_strangers and self._is_skipping:",
        "a parameter exchanged in param_groups is stepped by each rank's own gradient",
        _PROGRAMS,
    ),
    Mutation(
        "kept-memory-is-used-again",
        "optimizer",
        "torch/optim/buckets_in_order_of_readiness.py",
        "if is_held or any(slot.needs_own_memory for slot in inside):",
        "if any(slot.needs_own_memory for slot in inside):",
        "the next backward() overwrites a .grad that the program has kept",
        _PROGRAMS,
    ),
    Mutation(
        "result-in-another-tensor",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "        into = self._before\n",
        "        into = None\n",
        "the program's own .grad tensors keep this rank's gradient",
        _PROGRAMS,
    ),
    Mutation(
        "what-is-left-is-never-own",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "return origin is not Origin.REDUCTION",
        "return origin is Origin.PROGRAM",
        "a gradient written over that of an earlier step stays local",
        _PROGRAMS,
    ),
    Mutation(
        "earlier-result-is-reduced-again",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "target.sub_(self._base)",
        "target.sub_(0 * self._base)",
        "what an earlier reduction left counts twice if the parameter has a hook",
        _PROGRAMS,
    ),
    Mutation(
        "sum-takes-what-is-left",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "elif origin is Origin.LEFT and gradient.any():",
        "elif origin is Origin.LEFT and gradient is self._base:",
        "with op=SUM what an earlier step has left counts once for each rank",
        _PROGRAMS,
    ),
    Mutation(
        "changed-sum-is-accepted",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "if is_seen and not self.takes_mean:",
        "if is_seen and self._base is not None:",
        "with op=SUM a hook changes what an earlier reduction left once on each rank",
        _PROGRAMS,
    ),
    Mutation(
        "pushed-gradient-changes-unseen",
        "ps",
        "torch/ps/buckets.py",
        "self._pushed.take(self._parameters, self._turn if can_read else None)",
        "self._pushed.take(self._parameters, None)",
        "a gradient that is changed through .data after its push is not refused",
        _PROGRAMS,
    ),
    Mutation(
        "served-weights-change-unseen",
        "ps",
        "torch/ps/buckets.py",
        "self._fetched.take(self._parameters, None if self._is_on_gpu else self._turn)",
        "self._fetched.take(self._parameters, None)",
        "weights that are clipped through .data are not clipped on the servers",
        ("with_torch/test_ps_changes_of_grad.py",),
    ),
    Mutation(
        "values-are-exchanged-after-pushes",
        "ps",
        "torch/ps/exchange_state_with_servers.py",
        "if feeder.pusher.n_pushed and not has_new_values:",
        "if feeder.pusher.n_pushed < 0 and not has_new_values:",
        "pull_parameters() between backward() and step() makes gradients count twice",
        ("with_torch/test_ps_changes_of_grad.py",),
    ),
    Mutation(
        "served-parameters-are-exchanged",
        "ps",
        "torch/ps/push_during_backward.py",
        "if group_of.keys() != {id(slot.parameter) for slot in slots}:",
        "if not group_of:",
        "a parameter exchanged in param_groups is never updated by the servers",
        ("with_torch/test_ps_changes_of_grad.py",),
    ),
    Mutation(
        "the-original-steps-by-itself",
        "optimizer",
        "torch/optim/wrapping.py",
        "    _share_step(wrapped, optimizer)\n",
        "",
        "step() of the optimizer that was wrapped uses gradients of this rank alone",
        ("with_torch/test_ways_around_step.py",),
    ),
    Mutation(
        "weights-are-changed-by-a-part",
        "optimizer",
        "torch/optim/reducer.py",
        "            part.require_equal_weights()\n",
        "            pass\n",
        "with shard_state=1 an update by hand gives each rank other weights",
        ("with_torch/test_ways_around_step.py",),
    ),
    Mutation(
        "bounded-workers-begin-apart",
        "ps",
        "torch/ps/count_steps_and_embeddings.py",
        "if most > session.clock:",
        "if most > session.clock + 99:",
        "a worker waits for ever for steps of another that waits for it",
        ("with_torch/test_ways_around_step.py",),
    ),
]

FACES = [
    Mutation(
        "last-news-is-the-last-to-join",
        "order",
        "engine/peers/join.py",
        "return max(joined, key=lambda rank: (joined[rank], rank))",
        "return list(joined)[-1]",
        "join() returns another rank on each, by whose news came last",
        ("unit/test_join.py",),
    ),
    Mutation(
        "join-leaves-at-once",
        "order",
        "engine/peers/join.py",
        "lambda: len(sealed) == size and self._has_served()",
        "self._has_served",
        "a rank leaves join() while another still sends what it is invited to",
        ("unit/test_join.py",),
    ),
    Mutation(
        "integers-are-rounded",
        "dtype",
        "collectives/scale_factors.py",
        "np.trunc(values.astype(np.float64) * factor)",
        "np.rint(values.astype(np.float64) * factor)",
        "prescaled integers differ from Horovod's",
        ("unit/test_scale_factors.py",),
    ),
    Mutation(
        "numbers-of-process-sets-return",
        "order",
        "torch/horovod/process_sets.py",
        "which.process_set_id, self._next_id = self._next_id, self._next_id + 1",
        "which.process_set_id, self._next_id = self._next_id, len(self)",
        "after remove_process_set() two process sets have one id",
        ("with_torch/test_horovod_process_sets.py",),
    ),
    Mutation(
        "batch-size-for-samples",
        "optimizer",
        "data/loader.py",
        "self._optimizer.set_samples(n)",
        "self._optimizer.set_samples(self.batches.batch_size)",
        "the last, smaller batch of a rank counts as much as a whole one",
        ("with_torch/test_data_with_torch.py",),
    ),
    Mutation(
        "an-epoch-that-is-over-begins-again",
        "optimizer",
        "data/sampler.py",
        "epoch, phases, taken = self._run.epoch + 1, (), 0",
        "phases, taken = (), 0",
        "a checkpoint at the end of an epoch repeats the epoch",
        ("unit/test_sampler.py",),
    ),
    Mutation(
        "callbacks-share-a-name",
        "order",
        "torch/distributed/group/name_operations_in_callbacks.py",
        "return callback.path.then(str(callback.counts[group]))",
        'return callback.path.then("1")',
        "the second operation of a hook's callback meets the first of another rank's",
        ("with_torch/test_collectives_of_callbacks_match_in_any_order.py",),
    ),
]

REFUSALS = [
    Mutation(
        "what-met-a-given-up-gradient-is-used",
        "optimizer",
        "torch/optim/finish_backward.py",
        "(each.number >= failed_at and each.can_be_sent_again)",
        "each.number >= failed_at",
        "a gradient that was added to one of a skipped batch is averaged once more",
        ("with_torch/test_optimizer_faults.py",),
    ),
    Mutation(
        "a-rank-that-is-not-asked-for-waits-elsewhere",
        "fault",
        "engine/peers/answer_whether_entered.py",
        "if task.waiters and source in task.members:",
        "if source in task.members:",
        "zero_grad() leaves the buckets of a failed backward(), though others come for them",
        ("unit/test_control_messages.py",),
    ),
    Mutation(
        "a-failed-backward-waits-for-a-crossed-rank",
        "fault",
        "torch/optim/finish_backward.py",
        "return self._handle.wait_unless(engine().here.is_crossed)",
        "return self._handle.wait_unless(lambda _: False)",
        "a rank that failed in backward() and one that failed in forward() wait for each other",
        ("with_torch/test_optimizer_faults.py",),
    ),
    Mutation(
        "a-batch-that-fails-on-all-ranks-is-not-skipped",
        "fault",
        "torch/optim/finish_backward.py",
        "each.has_failed or (each.number >= failed_at and",
        "not each.has_failed and (each.number >= failed_at and",
        "an optimizer's first backward() that fails on all ranks is a MismatchError afterwards",
        ("with_torch/test_optimizer_faults.py",),
    ),
    Mutation(
        "left-buckets-keep-gradients",
        "optimizer",
        "torch/optim/finish_backward.py",
        """\
            if gradient is not None and slot.is_in_bucket:
                slot.history.move(gradient, torch.empty_like(gradient))
""",
        """\
            del gradient
""",
        "the sum of a skipped batch is written to a .grad that zero_grad() has set to zeros",
        ("with_torch/test_optimizer_faults.py",),
    ),
    Mutation(
        "step-is-traced",
        "optimizer",
        "torch/optim/wrapping.py",
        "    untrace_methods(part, Optimizer)\n",
        "",
        "torch.compile traces the code that waits for other ranks, and compiles it for a long time",
        ("with_torch/test_uses_of_an_optimizer.py",),
    ),
    Mutation(
        "grad-loses-its-graph",
        "optimizer",
        "torch/optim/gradient_slot.py",
        "return gradient is not None and gradient.grad_fn is not None",
        "return False",
        "a second derivative of .grad ends in torch's bare words",
        ("with_torch/test_any_use_of_grad.py",),
    ),
    Mutation(
        "scatter-agrees-on-no-size",
        "dtype",
        "torch/distributed/group/collectives.py",
        """due = str(out.dtype).removeprefix("torch."), (out.numel(),)""",
        "due = None, None",
        "dist.scatter with another size on one rank ends that rank's engine",
        ("mpi/test_torch_distributed.py",),
    ),
    Mutation(
        "refused-sets-stay-in-use",
        "optimizer",
        "torch/horovod/process_sets.py",
        "        registry.take_back(n_before)\n",
        "",
        "after init() has refused a list of process sets, it refuses the valid list, too",
        ("with_torch/test_horovod_process_sets.py",),
    ),
    Mutation(
        "own-errors-must-have-one-text",
        "dtype",
        "engine/core/call.py",
        """(call.error or "").partition(":")[0]""",
        "call.error",
        "splits that are wrong on all ranks, with other values, are a MismatchError on each",
        ("with_torch/test_bad_torch_arguments.py",),
    ),
    Mutation(
        "compressors-are-compared-by-class",
        "dtype",
        "torch/compression.py",
        """owners = [*map(vars, reversed(kind.__mro__)), getattr(compressor, "__dict__", {})]""",
        "owners = [*map(vars, reversed(kind.__mro__))]",
        "ranks that compress with different settings add values of different scales",
        ("with_torch/test_compression_argument.py",),
    ),
]
