"""Faults of the parameter server outside of its core: clients, placement, values, checkpoints."""

from mutations.mutation import Mutation

PS = [
    Mutation(
        "seconds-between-checkpoints-outdo-steps",
        "ps",
        "ps/checkpoint/save_schedule.py",
        """        if self.every_s is not None and now - at >= self.every_s:
            return True
""",
        """        if self.every_s is not None:
            return now - at >= self.every_s
""",
        "ps.save(every_s=600, every_steps=100) saves every 10 minutes, however fast the steps are",
        ("unit/test_ps_lost_servers.py",),
    ),
    Mutation(
        "assigned-rows-are-rounded",
        "ps",
        "ps/protocol/row_compression.py",
        "if is_exact or self._codec is None:",
        "if self._codec is None:",
        "embeddings that are assigned to a table with compression have 8 or 11 bits from then on",
        ("unit/test_ps_row_compression.py",),
    ),
    Mutation(
        "ps-rows-are-late-for-good",
        "ps",
        "ps/client/rows/pushes.py",
        "self.n_rounds += n_more",
        "self.n_rounds = max(self.n_rounds, 0)",
        "after one slow episode all rows that a worker pushes are dropped",
        ("unit/test_ps_held_empty_and_missed_rounds.py",),
    ),
    Mutation(
        "ps-mean-without-weights",
        "ps",
        "ps/server/dense/round_mean.py",
        "Shares(grads, weights, sum(math.ldexp(part.weight, scale) for part in parts))",
        "Shares(grads, weights, len(parts))",
        "batches of unequal sizes train another model",
        (
            "unit/test_ps_dense_tables.py",
            "with_torch/test_ps_equivalence.py",
        ),
    ),
    Mutation(
        "ps-clipping-without-its-factor",
        "ps",
        "ps/server/rows/hash_shard.py",
        "divisor = sum(weights) / factor if factor else math.inf",
        "divisor = sum(weights)",
        "rows are updated with gradients that are neither clipped nor unscaled",
        (
            "unit/test_ps_row_rounds_held_until_release.py",
            "with_torch/test_ps_embedding_clipping_and_scaling.py",
        ),
    ),
    Mutation(
        "ps-a-step-called-again-leaves-out-a-bucket",
        "ps",
        "torch/ps/feeder.py",
        """\
        push = self._pushed(bucket, factor, scale)
        bucket.note_pushed(push, is_early=not self.options.is_deferred)
        self.n_pushed += 1""",
        """\
        self.n_pushed += 1
        push = self._pushed(bucket, factor, scale)
        bucket.note_pushed(push, is_early=not self.options.is_deferred)""",
        "a push without credit is lost, though step() was called again",
        ("with_torch/test_ps_embedding_clipping_and_scaling.py",),
    ),
    Mutation(
        "ps-residual-of-absent-segments-is-sent",
        "ps",
        "ps/client/dense/compression.py",
        "absent=absent(part))",
        "absent=())",
        "what compression dropped of a parameter without a gradient is lost",
        ("unit/test_ps_segments_without_gradient_stay.py",),
    ),
    Mutation(
        "ps-a-part-is-a-step-of-all-segments",
        "ps",
        "ps/server/dense/partition.py",
        "present = self.segments.present(gradient.mask) & self.segments.touched(part)",
        "present = self.segments.present(gradient.mask)",
        "Adam's bias correction of parameters that were not pushed to",
        ("unit/test_ps_segments_without_gradient_stay.py",),
    ),
    Mutation(
        "ps-dedup-stays-behind",
        "ps",
        "ps/server/partition_transfer.py",
        """\
        values.merge_applied(meta["applied"])
        contents""",
        "        contents",
        "after a move, a push that comes again is applied again",
        (
            "unit/test_ps_rebalance.py",
            "unit/test_ps_promises.py",
        ),
    ),
    Mutation(
        "ps-slots-stay-behind",
        "ps",
        "ps/server/dense/partition.py",
        'self.slots = [np.array(arrays[f"slot{k}"], self.dtype) for k in slots]',
        "self.slots = [np.zeros_like(self.slots[k]) for k in slots]",
        "after a restore or a move the optimizer has forgotten its state",
        (
            "unit/test_ps_checkpoint.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-steps-stay-behind",
        "ps",
        "ps/server/dense/partition.py",
        """\
self.steps = int(state.meta["steps"])
        if self.segments""",
        "if self.segments",
        "after a restore Adam corrects its bias anew",
        (
            "unit/test_ps_checkpoint.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-a-pull-before-its-round",
        "ps",
        "ps/client/dense/blocks.py",
        "return self.rounds[part] if mode.has_rounds else 0",
        "return max(0, self.rounds[part] - 1) if mode.has_rounds else 0",
        "a worker reads values without its own last round",
        (
            "unit/test_ps_dense_tables.py",
            "unit/test_ps_promises.py",
        ),
    ),
    Mutation(
        "ps-reads-beside-own-pushes",
        "ps",
        "ps/client/client.py",
        "self.send_queue.has(partition) or not order.is_empty",
        "self.send_queue.has(partition)",
        "a pull misses the push before it",
        (
            "unit/test_ps_promises.py",
            "unit/test_ps_dense_tables.py",
        ),
    ),
    Mutation(
        "ps-blocks-are-read-after-a-move",
        "ps",
        "ps/server/dense/block.py",
        """\
        self._may_read = may_read
        self._block.may_read = may_read and self._is_ready""",
        """\
        self._may_read = may_read
        self._block.may_read = self._is_ready""",
        "values of a partition that has moved are read where it was",
        (
            "unit/test_ps_rebalance.py",
            "unit/test_ps_promises.py",
        ),
    ),
    Mutation(
        "ps-credit-for-all",
        "ps",
        "ps/client/request_order.py",
        "is_small = not (n and held) or held + n <= CREDIT_NBYTES",
        "is_small = held >= 0",
        "a slow server's memory fills up",
        (
            "unit/test_ps_backpressure.py",
            "unit/test_ps_dense_tables.py",
        ),
    ),
    Mutation(
        "ps-learning-rate-of-the-first-push",
        "ps",
        "ps/client/dense/pushes.py",
        "if known[0] is not updater or len(known[1]) > _METAS_MAX:",
        "if len(known[1]) > _METAS_MAX:",
        "a schedule of the learning rate never reaches the servers",
        (
            "unit/test_ps_dense_tables.py",
            "with_torch/test_ps_optimizer_modes_state_and_refusals.py",
            "with_torch/test_ps_equivalence.py",
        ),
    ),
    Mutation(
        "ps-the-last-duplicate-wins",
        "ps",
        "ps/client/rows/hash_table.py",
        """\
        if assign:
            flat, values = last_of_each(flat, values)""",
        """\
        if len(flat):
            flat, values = last_of_each(flat, values)""",
        "an id that stands twice in a batch loses a gradient",
        (
            "unit/test_ps_row_bugs_of_other_servers.py",
            "unit/test_ps_hashtables.py",
        ),
    ),
    Mutation(
        "ps-rows-of-a-round-uncounted",
        "ps",
        "ps/server/rows/hash_shard.py",
        "rejected = self._apply(sources, gradients[0].hyper, divisor, number=number)",
        "rejected = self._apply(sources, gradients[0].hyper, 1.0, number=number)",
        "a round of a hash table is a sum, not a mean",
        (
            "unit/test_ps_hashtables.py",
            "with_torch/test_ps_embedding.py",
        ),
    ),
    Mutation(
        "ps-rows-that-moved-are-pushed-again",
        "ps",
        "ps/server/rows/hash_shard.py",
        """\
        if sent > self._along_last.get(rank, 0):
            return gradient""",
        """\
        if rank >= 0:
            return gradient""",
        "a push to rows that have moved is applied twice when it comes again",
        (
            "unit/test_ps_work_goes_on_while_rows_move.py",
            "unit/test_ps_row_bugs_of_other_servers.py",
        ),
    ),
    Mutation(
        "ps-partitions-are-not-flushed",
        "ps",
        "ps/checkpoint/files.py",
        """\
            self._file.flush()
            os.fsync(self._file.fileno())
""",
        """\
            self._file.flush()
""",
        "a checkpoint is complete before its values are on disk",
        ("unit/test_ps_killed_saves.py",),
    ),
    Mutation(
        "ps-the-newest-checkpoint-is-tidied",
        "ps",
        "ps/checkpoint/files.py",
        "kept = complete(root)[:keep]",
        "kept = complete(root)[1:keep]",
        "a save removes what it has just written",
        ("unit/test_ps_killed_saves.py", "unit/test_ps_checkpoint.py"),
    ),
    Mutation(
        "ps-a-restore-outlives-who-gave-it-up",
        "ps",
        "ps/checkpoint/server.py",
        "                _require_wanted(work)\n                self._prepared",
        "                self._prepared",
        "a server keeps a whole state, and is copied no more, after a restore that timed out",
        ("unit/test_ps_file_threads_hand_over.py",),
    ),
    Mutation(
        "ps-stale-rows-are-saved",
        "ps",
        "ps/checkpoint/server.py",
        "if before is not None and before.part == part and before.stamp == stamp:",
        "if before is not None and before.part == part:",
        "a save keeps what the one before wrote, though it has changed",
        (
            "unit/test_ps_checkpoint.py",
            "unit/test_ps_row_checkpoints.py",
        ),
    ),
    Mutation(
        "ps-late-is-not-told",
        "ps",
        "torch/ps/feeder.py",
        'self.was_applied = is_finite and "late" not in outcomes',
        "self.was_applied = is_finite",
        "who was late is not told so",
        (
            "with_torch/test_ps_optimizer_modes_state_and_refusals.py",
            "with_torch/test_ps_optimizer.py",
        ),
    ),
    Mutation(
        "ps-no-table-has-a-place-of-its-own",
        "ps",
        "ps/client/request_order.py",
        "return is_first or not there.n_pushes.get(table, 0)",
        "return is_first",
        "workers that push large tables in different orders wait for each other",
        ("unit/test_ps_backpressure.py",),
    ),
    Mutation(
        "ps-a-busy-partition-swaps-places",
        "ps",
        "ps/placement/partitions.py",
        "if load[dest] + heat < load[source]:",
        "if load[dest] < load[source]:",
        "a partition that outweighs all others moves with every rebalance, and relieves nobody",
        ("unit/test_ps_placement.py",),
    ),
    Mutation(
        "ps-largest-blocks-come-last",
        "ps",
        "ps/placement/partitions.py",
        "key=lambda i: (-sizes[i], i)",
        "key=lambda i: (sizes[i], i)",
        "one server has most of a table",
        ("unit/test_ps_placement.py",),
    ),
    Mutation(
        "ps-traffic-of-long-ago-decides",
        "ps",
        "ps/placement/rebalance.py",
        "recent = {part: counted_since(before.get(part, 0.0), x) for part, x in heat.items()}",
        "recent = dict(heat)",
        "what was busy an hour ago moves, not what is busy now",
        ("unit/test_ps_rebalance.py",),
    ),
    Mutation(
        "ps-counts-of-two-views-are-added",
        "ps",
        "ps/client/rows/maintenance.py",
        "return sum(counts[-1] if option == CallOption.COUNT else map(sum, counts))",
        "return sum(map(sum, counts))",
        "len() of a hash table counts rows twice that move",
        ("unit/test_ps_row_counts_and_evictions_during_moves.py",),
    ),
    Mutation(
        "ps-requests-overtake-what-comes-back",
        "ps",
        "ps/client/request_order.py",
        "self._n_old = len(self._sent)",
        "self._n_old = 0",
        "a push is applied before one that was made before it and comes back from a move",
        (
            "unit/test_ps_rebalance.py::test_what_came_back_leaves_in_the_order_in_which_it_was_made",
        ),
    ),
    Mutation(
        "ps-a-call-goes-where-rows-were",
        "ps",
        "ps/client/rows/row_calls.py",
        "if may_go and self._order.epoch == epoch:",
        "if may_go:",
        "a call that is made while rows move is refused, for its keys are another server's by now",
        ("unit/test_ps_row_counts_and_evictions_during_moves.py",),
    ),
    Mutation(
        "ps-moves-are-confirmed-too-early",
        "ps",
        "ps/client/rows/row_calls.py",
        """\
        if self._order.is_settled:
            for epoch""",
        """\
        if True:
            for epoch""",
        "servers believe clocks of workers whose pushes are still on their way back from a move",
        ("unit/test_ps_row_counts_and_evictions_during_moves.py",),
    ),
    Mutation(
        "ps-first-values-may-be-nan",
        "ps",
        "ps/client/arguments.py",
        "    if flat.size and math.isnan(flat.min()):",
        "    if flat.size and math.isnan(flat[0]):",
        "a table begins with NaN, which no update changes into a number",
        ("unit/test_ps_dense_tables.py",),
    ),
    Mutation(
        "a-push-is-taken-back-twice",
        "ps",
        "ps/client/dense/compression.py",
        "            if not sent.is_kept and ",
        "            if ",
        "error feedback sends a gradient twice that was late in a round that was skipped",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "a-push-from-before-the-values-were-replaced-is-taken-back",
        "ps",
        "ps/client/dense/compression.py",
        "sent.values == self._values",
        "sent.values <= self._values",
        "after a restore error feedback sends a gradient of the values before it",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "an-earlier-push-is-taken-back",
        "ps",
        "ps/client/dense/table.py",
        "if self._packer is not None and flags & ABSENT:",
        "if self._packer is not None and flags & ASSIGN:",
        "error feedback sends a gradient again after a skipped round to which its worker gave none",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "missed-rounds-of-an-earlier-table",
        "ps",
        "ps/client/first_of.py",
        "            self.n_missed = 0\n            self._began",
        "            self._began",
        "tables that are opened again begin with the rounds that an earlier one has missed",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
]
