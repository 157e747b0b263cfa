"""Faults of the API for torch."""

from mutations.mutation import Mutation

OPTIMIZER = [
    Mutation(
        "unused-keeps-last-step",
        "optimizer",
        "torch/optim/gradient.py",
        """\
        if gradient is None or not code & DENSE:
            self._view.zero_()""",
        """\
        if gradient is None or not code & DENSE:""",
        "a parameter that a rank does not use counts with what its bucket held a step ago",
        ("with_torch/test_any_use_of_parameters.py",),
    ),
    Mutation(
        "empty-batch-times-zero",
        "optimizer",
        "torch/optim/buckets.py",
        "return wire.mul_(samples) if samples else wire.zero_()",
        "return wire.mul_(samples)",
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
        "own-ready-order",
        "optimizer",
        "torch/optim/bucket_plan.py",
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
        "torch/optim/gradient.py",
        "if is_seen or is_in_bucket:",
        "if is_seen:",
        "gradients that are not zeroed between steps are overwritten instead of added to",
        ("with_torch/test_any_use_of_grad.py",),
    ),
    Mutation(
        "number-of-optimizers",
        "optimizer",
        "torch/backward/serial_numbers_and_samples.py",
        "number = _counts.get(group, 0) + 1",
        "number = min(_counts.get(group, 0) + 1, 2)",
        "once an optimizer was dropped, two others take each other's messages",
        ("with_torch/test_buckets_during_backward.py",),
    ),
    Mutation(
        "late-in-the-bucket",
        "optimizer",
        "torch/optim/gradient.py",
        """\
            self.parameter.grad = None
        else:
            self._sent = packed.detach().clone()""",
        """\
            pass
        else:
            self._sent = packed.detach().clone()""",
        "what a second loss adds goes into a bucket that is under way, and counts twice or not",
        ("with_torch/test_any_use_of_parameters.py",),
    ),
    Mutation(
        "samples-for-ever",
        "optimizer",
        "torch/optim/reducer.py",
        """\
        self.step += 1
        self.samples = None""",
        """\
        self.step += 1""",
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
        ("with_torch/test_horovod_collectives.py",),
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
        "torch/distributed/group/callback_op_names.py",
        "return callback.path.then(str(callback.counts[group]))",
        'return callback.path.then("1")',
        "the second operation of a hook's callback meets the first of another rank's",
        ("with_torch/test_callbacks_of_futures.py",),
    ),
]
