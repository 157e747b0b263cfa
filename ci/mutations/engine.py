"""Faults of the engine, the collectives and the cache of names."""

from mutations.mutation import Mutation

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
        ("unit/test_driver_never_waits_for_itself.py",),
    ),
    Mutation(
        "options-are-dropped-within-a-node",
        "order",
        "engine/api/collectives.py",
        """\
        if name is None and (not options or _are_default(options)):
            calls = _short(group)
            if calls is not None:
                return calls.run(kind, x, op)
""",
        """\
        if name is None:
            calls = _short(group)
            if calls is not None:
                return calls.run(kind, x, op)
""",
        "allreduce_(deterministic=True) of a small array within a node is not deterministic",
        ("unit/test_options_reach_the_plan.py",),
    ),
    Mutation(
        "scan-in-another-order",
        "order",
        "collectives/algorithms/node.py",
        "raw = [source.bytes for source in sources]",
        "raw = [source.bytes for source in reversed(sources)]",
        "the bits of a scan in a node are not those of one between hosts",
        ("unit/test_scan.py",),
    ),
    Mutation(
        "exscan-passes-on-its-own-result",
        "order",
        "collectives/algorithms/chain.py",
        "sums = x if is_first or is_last else t.scratch(x, x.count)",
        "sums = x if is_first or is_last else out",
        "between hosts the result of an exscan has the values of its own rank, too",
        ("unit/test_scan.py",),
    ),
    Mutation(
        "split-forgets-the-key",
        "order",
        "engine/operations/split.py",
        'ranks[np.argsort(pairs[ranks, 1], kind="stable")]',
        "ranks",
        "a split numbers the ranks of each new group as the old one did",
        ("unit/test_groups.py",),
    ),
    Mutation(
        "wrong-color-fails-alone",
        "order",
        "engine/api/collectives.py",
        """\
    pairs = engine().execute("split", None, lambda g: plan_split(g, None, color, key), group)
    whole = engine().groups.or_default(group)
""",
        """\
    whole = engine().groups.or_default(group)
    plan = plan_split(whole, None, color, key)
    pairs = engine().execute("split", None, lambda _: plan, group)
""",
        "the ranks wait for ever for one that passes a wrong color to split()",
        ("unit/test_groups.py",),
    ),
    Mutation(
        "number-taken-for-an-array",
        "order",
        "engine/executors/short_calls.py",
        "x.shape or type(x)",
        "x.shape",
        "after such arrays, a number that is broadcast is an array on all ranks but the root",
        ("unit/test_scalars.py",),
    ),
    Mutation(
        "long-int-fails-alone",
        "order",
        "engine/executors/short_calls.py",
        """\
        except Exception:  # noqa: BLE001 - the plan raises it, so that the other ranks learn of it
            return self._by_plan(kind, x, op, root, timeout_s=timeout_s)
        result = self.run""",
        """\
        except KeyError:
            return self._by_plan(kind, x, op, root, timeout_s=timeout_s)
        result = self.run""",
        "where one rank passes an int beyond int64, the others wait for it, for ever",
        ("unit/test_scalars.py",),
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
        "transport/failure_news.py",
        "edge.dest, edge.n_sent = self._next_of(rank), 0",
        "edge.dest = self._next_of(rank)",
        "who stands behind a dead rank never hears what that one had heard",
        ("unit/test_spread_of_failure_news.py",),
    ),
    Mutation(
        "who-leaves-silently-cuts-off",
        "fault",
        "transport/failure_news.py",
        "self._resting |= ranks",
        "pass",
        "news is still passed to a rank that passes on nothing, and to nobody behind it",
        ("unit/test_spread_of_failure_news.py",),
    ),
    Mutation(
        "last-sender-first",
        "order",
        "transport/control_messages.py",
        "box.append((source, header, text))",
        "box.appendleft((source, header, text))",
        "recv(ANY_SOURCE) serves the last sender first, so that busy ranks starve the others",
        ("unit/test_control_messages.py", "unit/test_send_recv.py"),
    ),
    Mutation(
        "dissent-is-not-passed-on",
        "order",
        "engine/core/agreement.py",
        "all_agree = all_agree and heard.flag and heard.fingerprint == fingerprint",
        "all_agree = all_agree and heard.fingerprint == fingerprint",
        "of more than two ranks some take a mismatch for an agreement, and hang or mix data",
        ("unit/test_agreement.py",),
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
        "transport/node/shared_memory.py",
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
        "partial(t.combine_all, mine, sources, op)",
        "partial(t.combine_all, mine, sources[t.rank :] + sources[: t.rank], op)",
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
        "engine/core/meet_and_leave.py",
        "text = await broadcast_bytes(table.encode(), 0, t)",
        "text = await broadcast_bytes(table.encode(), 0, t) and table.encode()",
        "ranks choose by tables of their own, run two algorithms against each other, and hang",
        ("unit/test_tuning_files.py",),
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
    Mutation(
        "guests-of-groups-that-they-are-not-in",
        "order",
        "engine/peers/join.py",
        "[rank for rank in guests if rank in work.task.members]",
        "guests",
        "join() fails on a rank while others work in a group without it",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "guests-of-later-operations-of-such-groups",
        "order",
        "engine/peers/join.py",
        "self._guests(work.task.members)",
        "self._guests(range(self._size))",
        "join() fails on a rank when others go on in a group without it",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "steps-missed-in-join-are-none",
        "order",
        "engine/core/engine.py",
        "        self.control.catch_up(n_steps)\n",
        "",
        "after join() ranks take a command of ctl at different steps",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "owner-that-is-gone",
        "order",
        "engine/control/step_boundary.py",
        "if self._has_owner and not is_new and",
        "if self._owner() is not None and not is_new and",
        "whose steps count goes by each rank's garbage collector",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "through-with-the-smallest-share",
        "order",
        "data/sampler.py",
        'each["epoch"] == epoch else self.n for each',
        'each["epoch"] == epoch else self.n // each["size"] for each',
        "a sample comes twice if the rank with the larger share was through first",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "an-epoch-that-has-begun-is-over",
        "order",
        "data/sampler.py",
        "if n >= run.n_batches and (n or run.is_over):",
        "if n >= run.n_batches:",
        "a loss between the begin of an epoch and its first batch skips that epoch",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "seen-in-join-for-ever",
        "order",
        "engine/peers/join.py",
        "            self.seen = ()\n            del self._joined",
        "            del self._joined",
        "a sampler refuses to begin an epoch after join() has returned",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "two-steps-of-a-rival-in-all",
        "order",
        "engine/control/step_boundary.py",
        "        if self._owner() is owner:\n            self._rivals.clear()\n",
        "        if self._owner() is owner:\n",
        "of two optimizers that step in turn, now the one counts and now the other",
        ("unit/test_features_beside_their_neighbours.py",),
    ),
    Mutation(
        "the-run-whose-folder-begins-alike",
        "fault",
        "launch/job/processes/ranks_of_this_host.py",
        "mark.fullmatch(each)",
        "mark.match(each)",
        "the command for the run /runs/a takes the processes of /runs/ab for its own",
        ("unit/test_features_beside_their_neighbours.py",),
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
        return Ticket(name, entry.base, entry.number)""",
        """\
        return Ticket(name, entry.base, entry.number + 1)""",
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
        "engine/api/blocking_async_in_place.py",
        "return request.start()",
        "return request.start(is_borrowed=True) if request.borrows else request.start()",
        "what is done to x after allreduce_async(x) is in the sums of other ranks",
        ("unit/test_async.py",),
    ),
    Mutation(
        "known-names-wait-for-the-agreement",
        "cache",
        "engine/executors/routes.py",
        "and not plan.agrees_first",
        "and not plan.agrees_first and not ticket.name",
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
        "averages-of-integers-on-the-way",
        "dtype",
        "collectives/operators.py",
        "or (self is Op.AVERAGE and dtype.is_integer)",
        "",
        "between hosts an average of uint8 wraps: 200 and 250 give 97",
        ("unit/test_collectives.py",),
    ),
    Mutation(
        "who-joined-adds-zero-to-all",
        "dtype",
        "engine/executors/joined_rank.py",
        "options.op.identity(dtype)",
        "0",
        "a rank that has joined changes every PRODUCT to 0, and many a MIN and MAX",
        ("unit/test_join.py",),
    ),
    Mutation(
        "factors-scale-what-who-joined-gives",
        "dtype",
        "engine/executors/joined_rank.py",
        "StandInOptions(*call.reduction)",
        "call.reduction",
        "with a factor, a rank that has joined changes MIN, MAX and PRODUCT",
        ("unit/test_scale_factors.py",),
    ),
    Mutation(
        "factors-are-lost-on-a-gpu",
        "dtype",
        "gpu/executor/prepare_and_enqueue_jobs.py",
        "        device.launch(stream, kernel)\n    if job.buffer is not None:",
        "        pass\n    if job.buffer is not None:",
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
        ("unit/test_rooted_grouped_and_object_collectives.py",),
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
        ("with_torch/test_broadcast_state_and_tensors_in_collectives.py",),
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
        ("with_torch/test_broadcast_state_and_tensors_in_collectives.py",),
    ),
]
