"""The faults that ci/mutants plants, one at a time: mistakes that a good engineer could make.

Each imports and sums two float32 arrays over two ranks, so that only a test of the rule that it
breaks can tell.
"""

from dataclasses import dataclass

CATEGORIES = ("order", "cache", "dtype", "fault", "optimizer", "ps", "gpu", "node", "wire")


@dataclass(frozen=True)
class Mutation:
    """One fault.

    Attributes:
        name: for the command line.
        category: one of CATEGORIES.
        file: within ringcomm/.
        old: text that occurs in it once.
        new: what stands there instead.
        harm: what a user would suffer.
        targets: the tests that are most likely to catch it, within tests/.
    """

    name: str
    category: str
    file: str
    old: str
    new: str
    harm: str
    targets: tuple[str, ...]

    def planted(self, root):
        """Return the file to change, in the checkout `root`, and its faulty text.

        Raises:
            ValueError: `old` does not occur exactly once.
        """
        path = root / "ringcomm" / self.file
        text = path.read_text()
        n = text.count(self.old)
        if n != 1:
            raise ValueError(f"{self.name}: its text occurs {n} times in ringcomm/{self.file}")
        return path, text.replace(self.old, self.new)


ORDER = [
    Mutation(
        "tensor-still-under-way",
        "order",
        "engine/api/point_to_point.py",
        """\
    x = arrived(x)
    adapter = any_adapter_for(x)""",
        """\
    adapter = any_adapter_for(x)""",
        "a pipeline stage that sends what tensor parallelism returns waits for itself, for ever",
        ("unit/test_turn.py",),
    ),
    Mutation(
        "place-counts-names",
        "order",
        "engine/core/ledger.py",
        """\
        if name is None:
            return self.unnamed(self.take_place())""",
        """\
        place = self.take_place()
        if name is None:
            return self.unnamed(place)""",
        "unnamed calls mismatch where ranks start named ones in another order beside them",
        ("unit/test_random_programs.py",),
    ),
    Mutation(
        "few-unnamed-streams",
        "order",
        "engine/core/ledger.py",
        "return ticket.number % self._n_unnamed",
        "return ticket.number % 8",
        "with more than 8 unnamed operations in flight one may get the data of another",
        ("unit/test_ledger.py",),
    ),
    Mutation(
        "death-cuts-off",
        "fault",
        "transport/news.py",
        "edge.dest, edge.told = self._next_of(rank), 0",
        "edge.dest = self._next_of(rank)",
        "who stands behind a dead rank never hears what that one had been told",
        ("unit/test_news.py",),
    ),
    Mutation(
        "who-leaves-silently-cuts-off",
        "fault",
        "transport/news.py",
        "self._silent |= ranks",
        "pass",
        "news is still passed to a rank that passes on nothing, and to nobody behind it",
        ("unit/test_news.py",),
    ),
    Mutation(
        "last-sender-first",
        "order",
        "transport/watch.py",
        "box.append((source, header, text))",
        "box.appendleft((source, header, text))",
        "recv(ANY_SOURCE) serves the last sender first, so that busy ranks starve the others",
        ("unit/test_watch.py", "unit/test_p2p.py"),
    ),
    Mutation(
        "dissent-is-not-passed-on",
        "order",
        "engine/core/agreement.py",
        "all_agree = all_agree and heard.flag and heard.fingerprint == fingerprint",
        "all_agree = all_agree and heard.fingerprint == fingerprint",
        "of more than two ranks some take a mismatch for an agreement, and hang or mix data",
        ("unit/test_mismatch.py",),
    ),
    Mutation(
        "own-contexts-alone",
        "order",
        "engine/core/agreement.py",
        "in_use |= int(letter.text, 16)",
        "in_use |= int(letter.text, 16) & in_use",
        "two groups that overlap in one rank may share a context, and take each other's messages",
        ("unit/test_groups.py",),
    ),
    Mutation(
        "window-is-not-cleared",
        "order",
        "transport/node/shm.py",
        "        self.memory.clear_window(context)\n",
        "",
        "a group whose context was another's before meets what that one left in shared memory",
        ("unit/test_groups.py",),
    ),
    Mutation(
        "spoiled-context-comes-again",
        "order",
        "engine/core/ledger.py",
        "self.is_spoiled |= is_spoiled",
        "self.is_spoiled |= False",
        "a new group receives what a mismatch has left on the wire in one that is over",
        ("unit/test_groups.py",),
    ),
    Mutation(
        "sum-from-own-rank",
        "order",
        "collectives/algorithms/direct.py",
        "combine_all(mine, sources, op)",
        "combine_all(mine, sources[t.rank :] + sources[: t.rank], op)",
        "deterministic=True gives other bits when buckets are cut differently",
        ("unit/test_operators.py",),
    ),
    Mutation(
        "further-ahead-than-a-step",
        "order",
        "collectives/algorithms/segmented.py",
        "ahead = min(AHEAD, len(cuts[0]))",
        "ahead = AHEAD",
        "a ring of few segments sends on what has not arrived yet",
        ("unit/test_algorithms.py",),
    ),
    Mutation(
        "chunks-move-with-the-ring",
        "order",
        "collectives/algorithms/segmented.py",
        "cut(x, [parts[rank] for rank in order], t)",
        "cut(x, parts, t)",
        "where hosts are interleaved, reduce_scatter gives each rank another one's chunk",
        ("unit/test_algorithms.py",),
    ),
    Mutation(
        "each-rank-its-own-table",
        "order",
        "engine/core/lifecycle.py",
        "text = await broadcast_bytes(table.encode(), 0, t)",
        "text = await broadcast_bytes(table.encode(), 0, t) and table.encode()",
        "ranks choose by tables of their own, run two algorithms against each other, and hang",
        ("unit/test_tuning.py",),
    ),
    Mutation(
        "recorded-for-other-ranks",
        "order",
        "collectives/recording.py",
        "self.peers.setdefault(self._members[rank], len(self.peers))",
        "self.peers.setdefault(rank, len(self.peers))",
        "an algorithm among some of the ranks sends to others, and hangs",
        ("unit/test_recording.py",),
    ),
]

CACHE = [
    Mutation(
        "any-call-is-cached",
        "cache",
        "engine/core/ledger.py",
        "return entry.stream if entry and entry.fingerprint == fingerprint else None",
        "return entry.stream if entry and entry.fingerprint is not None else None",
        "a changed call sends before it is agreed on, and breaks the engine instead of a mismatch",
        ("unit/test_ledger.py", "unit/test_async.py"),
    ),
    Mutation(
        "poisoned-name-keeps-its-stream",
        "cache",
        "engine/core/ledger.py",
        "is_lasting = stream < self._first_passing and not is_spoiled",
        "is_lasting = stream < self._first_passing",
        "after a mismatch a name's next call receives what was left on the wire",
        ("unit/test_ledger.py", "unit/test_async.py"),
    ),
    Mutation(
        "uses-share-a-key",
        "cache",
        "engine/core/ledger.py",
        """\
        entry.number += 1
        return Ticket(name, self._bases[name], entry.number)""",
        """\
        return Ticket(name, self._bases[name], entry.number + 1)""",
        "a rank that is asked for the next use of a name says it is in it, for it was in the last",
        ("unit/test_ledger.py",),
    ),
    Mutation(
        "stale-ranks-keep-the-entry",
        "cache",
        "engine/executors/routes.py",
        """\
            work.ledger.settle(work.ticket, stream, None)
            raise await""",
        """\
            raise await""",
        "after a mismatch the ranks disagree on whether a name is cached, and its next call hangs",
        ("unit/test_async.py",),
    ),
    Mutation(
        "done-before-agreed",
        "cache",
        "engine/progress/task.py",
        "return bool(self._coroutines)",
        "return any(coroutine is self._first for coroutine, _ in self._coroutines)",
        "the second barrier of a name lets ranks out before all are in",
        ("unit/test_collectives.py", "unit/test_async.py"),
    ),
    Mutation(
        "who-does-not-wait-lends-too",
        "cache",
        "engine/api/forms.py",
        "return request.start()",
        "return request.start(is_borrowed=True) if request.borrows else request.start()",
        "what is done to x after allreduce_async(x) is in the sums of other ranks",
        ("unit/test_async.py",),
    ),
    Mutation(
        "known-names-wait-for-the-agreement",
        "cache",
        "engine/executors/routes.py",
        "if stream is None or work.problem is not None or plan.agrees_first:",
        "if stream is None or work.problem is not None or plan.agrees_first or ticket.name:",
        "every operation of a training step waits a round of messages before its data moves",
        ("unit/test_routes.py",),
    ),
    Mutation(
        "deterministic-is-not-compared",
        "cache",
        "engine/core/call.py",
        "(self.reduction.op.name, *self.reduction[1:])",
        "(self.reduction.op.name, False, *self.reduction[2:])",
        "ranks that differ in deterministic= run two algorithms against each other, and hang",
        ("unit/test_operators.py",),
    ),
    Mutation(
        "passing-names-share-a-stream",
        "cache",
        "engine/core/ledger.py",
        """\
        self._next_passing = self._first_passing + (stream + 1 - self._first_passing) % n_passing
""",
        "",
        "beyond 4096 names, operations in flight take each other's data",
        ("unit/test_ledger.py", "unit/test_async.py"),
    ),
]

DTYPE = [
    Mutation(
        "who-joined-adds-zero-to-all",
        "dtype",
        "engine/operations/neutral.py",
        "_neutral_value(dtype, options_of(call).op)",
        "0",
        "a rank that has joined changes every PRODUCT to 0, and many a MIN and MAX",
        ("unit/test_join.py",),
    ),
    Mutation(
        "factors-are-lost-on-a-gpu",
        "dtype",
        "gpu/executor/plans.py",
        '_NO_FACTORS if options.is_scaled else "",\n        is_elementwise',
        '"",\n        is_elementwise',
        "prescale and postscale count for arrays in host memory alone",
        ("gpu/test_collectives.py",),
    ),
    Mutation(
        "fusion-by-width",
        "dtype",
        "engine/operations/grouped.py",
        "Item(flat.bytes.nbytes, flat.dtype.name)",
        "Item(flat.bytes.nbytes, flat.dtype.itemsize)",
        "grouped_allreduce adds int32 as if it were float32",
        ("unit/test_exchange.py",),
    ),
    Mutation(
        "bfloat16-is-no-float",
        "dtype",
        "arrays/dtypes.py",
        'return "float" in self.name',
        'return self.name.startswith("float")',
        "BAND of bfloat16 is not refused with the words that say what to do",
        ("unit/test_operators.py",),
    ),
    Mutation(
        "foreign-byte-order",
        "dtype",
        "arrays/numpy.py",
        "if not x.dtype.isnative:",
        "if x.dtype.isnative is None:",
        "big-endian arrays are summed as if they were little-endian",
        ("unit/test_collectives.py",),
    ),
    Mutation(
        "pending-negation",
        "dtype",
        "arrays/torch.py",
        "return x.is_contiguous() and is_aligned and not x.is_conj() and not x.is_neg()",
        "return x.is_contiguous() and is_aligned and not x.is_conj()",
        "a tensor with a pending negation, as z.conj().imag, is sent with the wrong sign",
        ("faces/test_state.py",),
    ),
    Mutation(
        "fortran-order-is-kept",
        "dtype",
        "arrays/numpy.py",
        'np.array(x, order="C", copy=True, subok=False)',
        'np.array(x, order="K", copy=True, subok=False)',
        "a Fortran-ordered array comes back as it was, not reduced",
        ("unit/test_collectives.py",),
    ),
    Mutation(
        "average-of-half-the-halves",
        "dtype",
        "transport/performer.py",
        "op, op.divisor(len(sources)))",
        "op, 1 if 'b' in out.dtype.name else op.divisor(len(sources)))",
        "AVERAGE of bfloat16 is a sum",
        ("unit/test_operators.py",),
    ),
    Mutation(
        "autograd-is-not-told",
        "dtype",
        "arrays/torch.py",
        "torch.autograd.graph.increment_version(x)",
        "x.detach()",
        "a backward() through values that a collective has overwritten is silently wrong",
        ("faces/test_state.py",),
    ),
]

FAULT = [
    Mutation(
        "any-death-is-an-obstacle",
        "fault",
        "transport/peers.py",
        "dead = {r: why for r, why in self.dead.items() if r in members}",
        "dead = dict(self.dead)",
        "a death outside a group ends the group's operations",
        ("unit/test_peers.py", "unit/test_groups.py"),
    ),
    Mutation(
        "verdict-before-the-last-look",
        "fault",
        "engine/progress/task_set.py",
        "self._finish(task, None if self._completes(task) else error)",
        "self._finish(task, error)",
        "an operation that all ranks had completed fails where one of them dies soon after",
        ("unit/test_faults.py::test_a_death_is_no_failure_for_the_operation_whose_part_was_done",),
    ),
    Mutation(
        "idle-ranks-are-deaf",
        "fault",
        "engine/progress/loop.py",
        "itertools.count(not is_due)",
        "itertools.count(1)",
        "a rank that loads data for long is reported like one that has been stopped",
        ("unit/test_faults.py::test_a_rank_that_computes_answers_that_it_is_in_no_operation",),
    ),
    Mutation(
        "deadline-of-the-whole",
        "fault",
        "engine/progress/task.py",
        """\
        if has_moved:
            self.patience = None
        return has_moved""",
        """\
        return has_moved""",
        "a large operation that moves all the time is ended after RINGCOMM_TIMEOUT_S",
        ("unit/test_faults.py::test_the_deadline_is_for_a_wait_in_which_nothing_moves",),
    ),
    Mutation(
        "leaving-waits-for-the-dead",
        "fault",
        "engine/progress/deadlines.py",
        "if peers.are_all_gone or peers.dead or now",
        "if peers.are_all_gone or now",
        "a rank that is done waits for survivors of a death, which may go on for hours",
        ("unit/test_faults.py::test_a_death_ends_the_wait_of_a_rank_that_leaves",),
    ),
    Mutation(
        "bad-values-are-harmless",
        "fault",
        "engine/core/completion.py",
        "return isinstance(error, MismatchError | ConfigError) or error is work.problem",
        "return isinstance(error, MismatchError | ConfigError | ValueError | TypeError)",
        "after an error in mid-operation a rank goes on, out of step with the others",
        (
            "unit/test_faults.py::test_an_error_in_mid_operation_breaks_the_engine_and_tells_the_others",
        ),
    ),
    Mutation(
        "refusal-is-the-end",
        "fault",
        "engine/progress/task_set.py",
        "task.fault_until = time.monotonic() + _CONFIRM_S",
        "task.fault_until = time.monotonic()",
        "a death that the wire notices first is told as a refused message, without the rank",
        ("unit/test_faults.py::test_a_death_that_the_wire_notices_first_is_told_as_one",),
    ),
    Mutation(
        "whoever-leaves-first",
        "fault",
        "engine/progress/deadlines.py",
        "is_alone = bool(awaited) and all(r in watch.peers.left for r in awaited)",
        "is_alone = any(r in watch.peers.left for r in awaited)",
        "recv(ANY_SOURCE) fails when one of several possible senders is done",
        ("unit/test_p2p.py",),
    ),
    Mutation(
        "follower-is-blamed",
        "fault",
        "transport/mpi.py",
        """\
            blames = last_words["end_code"]
""",
        """\
            blames = rank
""",
        "the report blames a rank that only followed another one's failure",
        ("unit/test_status.py",),
    ),
    Mutation(
        "short-messages-pass",
        "fault",
        "transport/mpi.py",
        "if self._expected and not self._requests:",
        "if self._expected < 0 and not self._requests:",
        "a message that comes short leaves what was in the buffer before, without an error",
        ("mpi/test_spmd.py",),
    ),
    Mutation(
        "moves-do-not-count",
        "fault",
        "transport/running.py",
        "return self._running.test() or self._run.moves != self._seen",
        "return self._running.test()",
        "a long operation is given up at its deadline although it goes on",
        ("unit/test_recording.py",),
    ),
    Mutation(
        "quiet-refusal",
        "fault",
        "engine/core/state.py",
        "elif not isinstance(error, CommTimeoutError):",
        "elif not isinstance(error, RingcommError):",
        "ranks wait out their deadline for one whose engine is broken",
        ("unit/test_faults.py::test_a_message_that_the_wire_refuses_is_told_to_all",),
    ),
]

OPTIMIZER = [
    Mutation(
        "unused-keeps-last-step",
        "optimizer",
        "torch/optim/gradient.py",
        """\
        if gradient is None or not code & DENSE:
            self._view.zero_()
            return""",
        """\
        if gradient is None or not code & DENSE:
            return""",
        "a parameter that a rank does not use counts with what its bucket held a step ago",
        ("faces/test_backward.py",),
    ),
    Mutation(
        "empty-batch-times-zero",
        "optimizer",
        "torch/optim/buckets.py",
        "return wire.mul_(samples) if samples else wire.zero_()",
        "return wire.mul_(samples)",
        "set_samples(0) for an empty batch, whose mean is NaN, makes every rank's gradient NaN",
        ("faces/test_samples.py",),
    ),
    Mutation(
        "weighed-in-16-bits",
        "optimizer",
        "torch/optim/buckets.py",
        "if self.buffer.dtype in _16_BIT:",
        "if self.buffer.dtype is torch.bfloat16:",
        "float16 gradients overflow when they are weighed by the number of samples",
        ("faces/test_samples.py",),
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
        ("faces/test_overlap.py",),
    ),
    Mutation(
        "kept-gradient-is-not-copied",
        "optimizer",
        "torch/optim/gradient.py",
        "return gradient.detach().clone() if own.data_ptr() == bucket.data_ptr() else gradient",
        "return gradient.detach() if own.data_ptr() == bucket.data_ptr() else gradient",
        "gradients that are not zeroed between steps are overwritten instead of added to",
        ("faces/test_grad.py",),
    ),
    Mutation(
        "number-of-optimizers",
        "optimizer",
        "torch/backward/registry.py",
        "newcomer.number = _counts.get(group, 0) + 1",
        "newcomer.number = min(_counts.get(group, 0) + 1, 2)",
        "once an optimizer was dropped, two others take each other's messages",
        ("faces/test_overlap.py",),
    ),
    Mutation(
        "late-in-the-bucket",
        "optimizer",
        "torch/optim/gradient.py",
        """\
            self.parameter.grad = None
            self.state = GradientState.LATE""",
        """\
            self.state = GradientState.LATE""",
        "what a second loss adds goes into a bucket that is under way, and counts twice or not",
        ("faces/test_backward.py",),
    ),
    Mutation(
        "samples-for-ever",
        "optimizer",
        "torch/optim/reducer.py",
        """\
        self.step += 1
        self._samples = None""",
        """\
        self.step += 1""",
        "the number of samples of one step weighs the next one, too",
        ("faces/test_samples.py",),
    ),
    Mutation(
        "added-weights-uncompared",
        "optimizer",
        "torch/optim/reducer.py",
        """\
        self._agreement.weights.expect_more()
        n = len(self.slots)""",
        """\
        n = len(self.slots)""",
        "parameters that are added between steps begin with other values on each rank, unnoticed",
        ("faces/test_first_weights.py",),
    ),
]

NODE = [
    Mutation(
        "left-unnoticed-in-memory",
        "fault",
        "engine/progress/deadlines.py",
        "gone = [r for r in task.late if r in watch.peers.left]",
        "gone = [r for r in task.late if r in watch.peers.dead]",
        "a rank that left is waited for in shared memory until the deadline",
        ("unit/test_node.py",),
    ),
    Mutation(
        "turn-kept-after-an-error",
        "order",
        "engine/executors/routes.py",
        """\
        finally:
            end_turn(work.neighbours, ticket)""",
        """\
        finally:
            if work.problem is None:
                end_turn(work.neighbours, ticket)""",
        "after a bad argument the sixteenth operation over several nodes hangs",
        ("unit/test_node.py",),
    ),
    Mutation(
        "disagreement-is-done",
        "cache",
        "engine/executors/node.py",
        "if step is None:",
        "if step is None or step.is_over:",
        "an allreduce of other shapes on another rank reduces nothing and says nothing",
        ("unit/test_node.py",),
    ),
    Mutation(
        "view-loses-its-memory",
        "order",
        "engine/api/registered.py",
        "return np.empty(lengths, kind) if data is None else data.view(kind).reshape(lengths)",
        "return np.empty(lengths, kind)",
        "registered arrays are ordinary ones, and every allreduce takes four passes",
        ("unit/test_node.py",),
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
        "collectives/scaling.py",
        "np.trunc(values.astype(np.float64) * factor)",
        "np.rint(values.astype(np.float64) * factor)",
        "prescaled integers differ from Horovod's",
        ("unit/test_scaling.py",),
    ),
    Mutation(
        "numbers-of-process-sets-return",
        "order",
        "torch/horovod/process_sets.py",
        "which.process_set_id, self._next_id = self._next_id, self._next_id + 1",
        "which.process_set_id, self._next_id = self._next_id, len(self._sets)",
        "after remove_process_set() two process sets have one id",
        ("faces/test_horovod.py",),
    ),
    Mutation(
        "batch-size-for-samples",
        "optimizer",
        "data/loader.py",
        "self._optimizer.set_samples(n)",
        "self._optimizer.set_samples(self.batches.batch_size)",
        "the last, smaller batch of a rank counts as much as a whole one",
        ("faces/test_data.py",),
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
        "torch/distributed/group/callbacks.py",
        "return callback.path.then(str(callback.counts[group]))",
        'return callback.path.then("1")',
        "the second operation of a hook's callback meets the first of another rank's",
        ("faces/test_callbacks.py",),
    ),
]

PARAMETER_SERVER = [
    Mutation(
        "ps-rounds-in-order-of-arrival",
        "ps",
        "ps/rounds.py",
        "return sorted((worker, each) for worker, each",
        "return list((worker, each) for worker, each",
        "sums depend on who was first: other bits in every run",
        (
            "unit/test_ps_rounds.py",
            "faces/test_ps_equivalence.py",
            "unit/test_ps_tables.py",
        ),
    ),
    Mutation(
        "ps-a-late-push-counts",
        "ps",
        "ps/rounds.py",
        "if number < self.current:\n            return False",
        "if number < self.current - 1:\n            return False",
        "a push whose round is over is told as applied, and is lost",
        (
            "unit/test_ps_rounds.py",
            "unit/test_ps_promises.py",
            "unit/test_ps_tables.py",
        ),
    ),
    Mutation(
        "ps-first-of-by-block",
        "ps",
        "ps/rounds.py",
        "counting &= self._entered.get(self.current, set())",
        "counting &= set(came)",
        "a gradient counts in one block and is late in another; clipped steps hang",
        ("unit/test_ps_rounds.py", "unit/test_ps_first_of.py"),
    ),
    Mutation(
        "ps-a-release-before-the-mean-is-lost",
        "ps",
        "ps/dense.py",
        "if release.number >= self.version:",
        "if self.held is not None and release.number >= self.version:",
        "release() right behind push(hold=True) does nothing, and the mean is held for ever",
        ("unit/test_ps_rounds_in_two.py",),
    ),
    Mutation(
        "ps-rows-are-late-for-good",
        "ps",
        "ps/hashtable.py",
        "self._n_pushed = max(self._n_pushed, version)",
        "self._n_pushed = max(self._n_pushed, 0)",
        "after one slow episode all rows that a worker pushes are dropped",
        ("unit/test_ps_rounds_in_two.py",),
    ),
    Mutation(
        "ps-ssp-by-the-fastest",
        "ps",
        "ps/rounds.py",
        "return min(self._of.values(), default=math.inf)",
        "return max(self._of.values(), default=math.inf)",
        "the bound of staleness bounds nothing",
        (
            "unit/test_ps_promises.py",
            "unit/test_ps_tables.py",
            "unit/test_ps_rounds.py",
        ),
    ),
    Mutation(
        "ps-who-finishes-holds-up-all",
        "ps",
        "ps/rounds.py",
        "        self._of.pop(worker, None)",
        "        self._of.get(worker, None)",
        "a worker that has finished keeps the others waiting for ever",
        (
            "unit/test_ps_tables.py",
            "unit/test_ps_rounds.py",
        ),
    ),
    Mutation(
        "ps-mean-without-weights",
        "ps",
        "ps/dense.py",
        "weights, sum(math.ldexp(part.weight, scale) for part in parts))",
        "weights, len(parts))",
        "batches of unequal sizes train another model",
        (
            "unit/test_ps_tables.py",
            "faces/test_ps_equivalence.py",
        ),
    ),
    Mutation(
        "ps-clipping-without-its-factor",
        "ps",
        "ps/hashed.py",
        "divisor = sum(weights) / factor if factor else math.inf",
        "divisor = sum(weights)",
        "rows are updated with gradients that are neither clipped nor unscaled",
        (
            "unit/test_ps_row_holds.py",
            "faces/test_ps_embedding_steps.py",
        ),
    ),
    Mutation(
        "ps-a-step-called-again-leaves-out-a-bucket",
        "ps",
        "torch/ps/bucket_pusher.py",
        """\
        bucket.note_pushed(self._pushed(bucket, factor, scale))
        self.n_pushed += 1""",
        """\
        self.n_pushed += 1
        bucket.note_pushed(self._pushed(bucket, factor, scale))""",
        "a push without credit is lost, though step() was called again",
        ("faces/test_ps_embedding_steps.py",),
    ),
    Mutation(
        "ps-residual-of-absent-segments-is-sent",
        "ps",
        "ps/packing.py",
        "absent=absent(part))",
        "absent=())",
        "what compression dropped of a parameter without a gradient is lost",
        ("unit/test_ps_segments.py",),
    ),
    Mutation(
        "ps-a-part-is-a-step-of-all-segments",
        "ps",
        "ps/dense.py",
        "present = self.segments.present(meta.mask) & self.segments.touched(part)",
        "present = self.segments.present(meta.mask)",
        "Adam's bias correction of parameters that were not pushed to",
        ("unit/test_ps_segments.py",),
    ),
    Mutation(
        "ps-a-push-twice",
        "ps",
        "ps/dense.py",
        "return header.incarnation != incarnation or header.sequence > last",
        "return True",
        "a push that comes twice is applied twice",
        (
            "unit/test_ps_promises.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-dedup-stays-behind",
        "ps",
        "ps/moving.py",
        """\
        merge_applied(part, meta["applied"])
        server.keep""",
        "        server.keep",
        "after a move, a push that comes again is applied again",
        (
            "unit/test_ps_rebalance.py",
            "unit/test_ps_promises.py",
        ),
    ),
    Mutation(
        "ps-old-epochs-are-served",
        "ps",
        "ps/serving.py",
        "if part is None or request.header.view != table.epochs.get(number, 0):",
        "if part is None:",
        "a request that was under way while a partition moved overtakes those before it",
        ("unit/test_ps_rebalance.py",),
    ),
    Mutation(
        "ps-slots-stay-behind",
        "ps",
        "ps/dense.py",
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
        "ps/dense.py",
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
        "ps/table.py",
        "return self._rounds[part] if mode.has_rounds else 0",
        "return max(0, self._rounds[part] - 1) if mode.has_rounds else 0",
        "a worker reads values without its own last round",
        (
            "unit/test_ps_tables.py",
            "unit/test_ps_promises.py",
        ),
    ),
    Mutation(
        "ps-reads-beside-own-pushes",
        "ps",
        "ps/client.py",
        "return lane.epoch if lane.is_empty and not self._engine.watch.peers.dead else -1",
        "return lane.epoch if not self._engine.watch.peers.dead else -1",
        "a pull misses the push before it",
        (
            "unit/test_ps_promises.py",
            "unit/test_ps_tables.py",
        ),
    ),
    Mutation(
        "ps-blocks-are-read-after-a-move",
        "ps",
        "ps/dense.py",
        """\
        self._is_kept = is_kept
        self._block.is_open = is_kept and self._is_ready""",
        """\
        self._is_kept = is_kept
        self._block.is_open = self._is_ready""",
        "values of a partition that has moved are read where it was",
        (
            "unit/test_ps_rebalance.py",
            "unit/test_ps_promises.py",
        ),
    ),
    Mutation(
        "ps-credit-for-all",
        "ps",
        "ps/credit.py",
        "is_small = not (n and held) or held + n <= most_nbytes",
        "is_small = held >= 0",
        "a slow server's memory fills up",
        (
            "unit/test_ps_backpressure.py",
            "unit/test_ps_tables.py",
        ),
    ),
    Mutation(
        "ps-learning-rate-of-the-first-push",
        "ps",
        "ps/table.py",
        "if known[0] is not updater or len(known[1]) > _METAS_MAX:",
        "if len(known[1]) > _METAS_MAX:",
        "a schedule of the learning rate never reaches the servers",
        (
            "unit/test_ps_tables.py",
            "faces/test_ps_optimizer_rules.py",
            "faces/test_ps_equivalence.py",
        ),
    ),
    Mutation(
        "ps-the-last-duplicate-wins",
        "ps",
        "ps/hashtable.py",
        """\
        if assign:
            flat, values = last_of_each(flat, values)""",
        """\
        if len(flat):
            flat, values = last_of_each(flat, values)""",
        "an id that stands twice in a batch loses a gradient",
        (
            "unit/test_ps_row_bugs.py",
            "unit/test_ps_hashtables.py",
        ),
    ),
    Mutation(
        "ps-rows-of-a-round-uncounted",
        "ps",
        "ps/hashed.py",
        "rejected = self._apply(sources, parts[0].hyper, divisor)",
        "rejected = self._apply(sources, parts[0].hyper, 1.0)",
        "a round of a hash table is a sum, not a mean",
        (
            "unit/test_ps_hashtables.py",
            "faces/test_ps_embedding.py",
        ),
    ),
    Mutation(
        "ps-rows-that-moved-are-pushed-again",
        "ps",
        "ps/hashed.py",
        """\
        if sent > self._along_last.get(rank, (-1, 0)):
            return keys, rows""",
        """\
        if rank >= 0:
            return keys, rows""",
        "a push to rows that have moved is applied twice when it comes again",
        (
            "unit/test_ps_row_moves.py",
            "unit/test_ps_row_bugs.py",
        ),
    ),
    Mutation(
        "ps-stale-rows-are-saved",
        "ps",
        "ps/storing.py",
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
            "faces/test_ps_optimizer_rules.py",
            "faces/test_ps_optimizer.py",
        ),
    ),
    Mutation(
        "ps-rounds-outrun-a-snapshot",
        "ps",
        "ps/rounds.py",
        "if not self.may_end(self.current + 1) or (came := self.complete()) is None:",
        "if (came := self.complete()) is None:",
        "a snapshot beside fast training never finds its moment",
        (
            "unit/test_ps_rounds.py",
            "unit/test_ps_evaluation.py",
        ),
    ),
    Mutation(
        "ps-a-pause-waits-for-another",
        "ps",
        "ps/pauses.py",
        "if not moves_wait or now >= each.until]",
        "if not moves_wait]",
        "beside a long evaluation no checkpoint is saved once partitions wait to move",
        ("unit/test_ps_pauses.py",),
    ),
    Mutation(
        "ps-one-waiting-request-per-change",
        "ps",
        "ps/waiting.py",
        "while heap and heap[0].wanted <= progress:",
        "if heap and heap[0].wanted <= progress:",
        "of several workers that wait for a round one goes on, and the others time out",
        ("unit/test_ps_waiting.py",),
    ),
    Mutation(
        "ps-a-table-begins-twice",
        "ps",
        "ps/dense.py",
        "if not (meta.flags & INITIAL and self.is_ready):",
        "if meta.flags:",
        "what was trained is set back when a table is opened again",
        ("unit/test_ps_opening.py",),
    ),
    Mutation(
        "ps-no-table-has-a-place-of-its-own",
        "ps",
        "ps/credit.py",
        "return is_first or not there.n_pushes.get(table, 0)",
        "return is_first",
        "workers that push large tables in different orders wait for each other",
        ("unit/test_ps_backpressure.py",),
    ),
]

GPU = [
    Mutation(
        "gpu-a-result-is-not-awaited",
        "gpu",
        "gpu/executor/streams.py",
        "device.await_event(self._issue.adapter.stream(device.index), self._done.handle)",
        "device.is_reached(self._done.handle)",
        "a caller's stream reads a result that is not there yet",
        (
            "gpu/test_streams.py",
            "gpu/test_collectives.py",
        ),
    ),
    Mutation(
        "gpu-arrays-are-not-awaited",
        "gpu",
        "gpu/executor/streams.py",
        "for event in self.ready:",
        "for event in self.ready[1:]:",
        "a collective reads an array before the caller's stream has written it",
        (
            "gpu/test_streams.py",
            "gpu/test_collectives.py",
        ),
    ),
    Mutation(
        "gpu-launches-are-in-any-order",
        "gpu",
        "gpu/executor/team.py",
        "if self._turn != place:",
        "if self._turn > place:",
        "two ranks launch in different orders, and their streams wait for each other",
        (
            "gpu/test_collectives.py",
            "gpu/test_streams.py",
        ),
    ),
    Mutation(
        "gpu-streams-are-not-freed",
        "gpu",
        "gpu/executor/team.py",
        """\
                if not is_reached:
                    self._free_stream(done, kept)""",
        """\
                if is_reached:
                    self._free_stream(done, kept)""",
        "torch.cuda.synchronize() never returns once a rank has died",
        ("gpu/test_faults.py",),
    ),
    Mutation(
        "gpu-what-breaks-off-is-left",
        "gpu",
        "gpu/executor/team.py",
        "self._free_stream(Event(self._gpu.device, self._own_transport.stream), keeps)",
        "Event(self._gpu.device, self._own_transport.stream)",
        "a stream stands for ever behind half an operation",
        ("gpu/test_faults.py",),
    ),
    Mutation(
        "gpu-a-stream-is-filled",
        "gpu",
        "gpu/executor/team.py",
        "if not transport.meets_on_stream or number % _PHASES_AHEAD == 0:",
        "if not transport.meets_on_stream:",
        "a stream that stands still blocks who would free it",
        ("gpu/test_faults.py",),
    ),
    Mutation(
        "gpu-each-rank-sets-up-what-it-can",
        "gpu",
        "gpu/executor/transport_setup.py",
        """\
        if not found:
""",
        """\
        if not mine.problem:
""",
        "ranks of a group move data in different ways",
        ("gpu/test_transport_setup.py",),
    ),
    Mutation(
        "gpu-a-group-leaves-its-streams",
        "gpu",
        "engine/peers/groups.py",
        "        self.when_over(group_id)\n",
        "",
        "each group costs a stream, mapped memory and a communicator until the job ends",
        ("gpu/test_collectives.py",),
    ),
    Mutation(
        "gpu-a-group-is-over-before-its-streams",
        "gpu",
        "gpu/executor/team.py",
        "kept = [keeps, result, group]",
        "kept = [keeps, result]",
        "memory is unmapped while another rank's kernel writes to it",
        ("gpu/test_collectives.py",),
    ),
    Mutation(
        "gpu-the-late-rank-is-another",
        "gpu",
        "gpu/transports/ipc.py",
        "behind = np.flatnonzero((numbers - own).view(np.int32) < 0)",
        "behind = np.flatnonzero((numbers - own).view(np.int32) > 0)",
        "the timeout names a rank that is not late",
        ("gpu/test_faults.py",),
    ),
    Mutation(
        "gpu-a-fused-step-overwrites-weights",
        "gpu",
        "torch/zero/fused_update.py",
        """\
        self._follow()
""",
        "",
        "what somebody writes to 16-bit weights is undone by the next step",
        ("gpu/test_fused_update.py",),
    ),
    Mutation(
        "gpu-a-replaced-gradient-is-not-read",
        "gpu",
        "torch/zero/fused_update.py",
        "            place.copy_(gradient)",
        "            pass",
        "a gradient that the user has replaced does not count",
        ("gpu/test_fused_update.py",),
    ),
    Mutation(
        "gpu-a-shared-gpu-gets-nccl",
        "gpu",
        "gpu/transports/choice.py",
        "if shared and not may_share:",
        "if shared and may_share:",
        "NCCL is asked for what it refuses",
        ("gpu/test_choice.py",),
    ),
]

MUTATIONS = [*ORDER, *CACHE, *DTYPE, *FAULT, *OPTIMIZER, *NODE, *FACES, *PARAMETER_SERVER, *GPU]
