"""Faults in the decisions of a parameter server, ringcomm/ps/server/core."""

from mutations.mutation import Mutation

PS_CORE = [
    Mutation(
        "ps-rounds-in-order-of-arrival",
        "ps",
        "ps/server/core/rounds.py",
        "return [came[worker] for worker in sorted(counting)] or None",
        "return [came[worker] for worker in came if worker in counting] or None",
        "sums depend on who was first: other bits in every run",
        (
            "unit/test_ps_rounds.py",
            "with_torch/test_ps_equivalence.py",
            "unit/test_ps_dense_tables.py",
        ),
    ),
    Mutation(
        "ps-a-late-push-counts",
        "ps",
        "ps/server/core/rounds.py",
        "if number < self.current or (number == self.current and self._held is not None):",
        "if number == self.current and self._held is not None:",
        "a push whose round is over is told as applied, and is lost",
        (
            "unit/test_ps_rounds.py",
            "unit/test_ps_promises.py",
            "unit/test_ps_dense_tables.py",
        ),
    ),
    Mutation(
        "ps-first-of-by-block",
        "ps",
        "ps/server/core/rounds.py",
        "counting &= self._let_in.get(self.current, set())",
        "counting &= set(came)",
        "a gradient counts in one block and is late in another; clipped steps hang",
        (
            "unit/test_ps_rounds.py",
            "unit/test_ps_first_of_k_counts_all_blocks_or_none.py",
        ),
    ),
    Mutation(
        "ps-a-release-before-the-mean-is-lost",
        "ps",
        "ps/server/core/rounds.py",
        """\
        self._releases.append(release)
""",
        """\
        self._releases += [release] if self._held is not None else []
""",
        "release() right behind push(hold=True) does nothing, and the mean is held for ever",
        ("unit/test_ps_held_empty_and_missed_rounds.py",),
    ),
    Mutation(
        "ps-ssp-by-the-fastest",
        "ps",
        "ps/server/core/rounds.py",
        "return min(self._of.values(), default=math.inf)",
        "return max(self._of.values(), default=math.inf)",
        "the bound of staleness bounds nothing",
        (
            "unit/test_ps_promises.py",
            "unit/test_ps_dense_tables.py",
            "unit/test_ps_rounds.py",
        ),
    ),
    Mutation(
        "ps-who-finishes-holds-up-all",
        "ps",
        "ps/server/core/rounds.py",
        "        self._of.pop(worker, None)",
        "        self._of.get(worker, None)",
        "a worker that has finished keeps the others waiting for ever",
        (
            "unit/test_ps_dense_tables.py",
            "unit/test_ps_rounds.py",
        ),
    ),
    Mutation(
        "ps-a-push-twice",
        "ps",
        "ps/server/core/unit.py",
        "return header.sequence <= self.applied.last_of(header.origin)",
        "return header.sequence < self.applied.last_of(header.origin)",
        "a push that comes twice is applied twice",
        (
            "unit/test_ps_promises.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-old-epochs-are-served",
        "ps",
        "ps/server/core/core.py",
        "if unit is None or request.header.view != epoch:",
        "if unit is None:",
        "a request that was under way while a partition moved overtakes those before it",
        ("unit/test_ps_rebalance.py",),
    ),
    Mutation(
        "ps-rounds-outrun-a-snapshot",
        "ps",
        "ps/server/core/rounds.py",
        "if not may_end:\n",
        "if is_held and not may_end:\n",
        "a snapshot beside fast training never finds its moment",
        (
            "unit/test_ps_rounds.py",
            "unit/test_ps_evaluation.py",
        ),
    ),
    Mutation(
        "ps-a-read-begins-a-pause",
        "ps",
        "ps/control/move_lock.py",
        "        if number not in self.pauses and number not in self._patient:\n",
        "        if number not in self.pauses:\n",
        "the two copies of a server begin a pause at different times, and come to differ",
        ("unit/test_ps_paused_moves.py",),
    ),
    Mutation(
        "ps-a-pause-waits-for-another",
        "ps",
        "ps/control/move_lock.py",
        "if not moves_wait or now >= until}",
        "if not moves_wait}",
        "beside a long evaluation no checkpoint is saved once partitions wait to move",
        ("unit/test_ps_paused_moves.py",),
    ),
    Mutation(
        "ps-one-waiting-request-per-change",
        "ps",
        "ps/server/core/unit.py",
        "while self._heap and self._heap[0].wanted <= progress:",
        "if self._heap and self._heap[0].wanted <= progress:",
        "of several workers that wait for a round one goes on, and the others time out",
        ("unit/test_ps_waiting_requests.py",),
    ),
    Mutation(
        "ps-a-table-begins-twice",
        "ps",
        "ps/server/core/unit.py",
        "return [Write(self.key, request, payload if first else None)]",
        "return [Write(self.key, request, payload)]",
        "what was trained is set back when a table is opened again",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_reopened_tables.py",
        ),
    ),
    Mutation(
        "ps-a-repeat-during-a-move-is-said-to-be-applied",
        "ps",
        "ps/server/core/unit.py",
        """\
            return []
        return [Acknowledge(self.key, request)]""",
        """\
            pass
        return [Acknowledge(self.key, request)]""",
        "a push that comes twice and then back from a move is lost",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-a-leave-during-a-move-holds-a-mean",
        "ps",
        "ps/server/core/migration.py",
        "rounds.limit(_MOVE, rounds.at)",
        "rounds.limit(_MOVE, (rounds.current, True))",
        "the mean of a round is lost with the server that its partition has left",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-a-leave-during-a-held-mean-leaves-it",
        "ps",
        "ps/server/core/rounds.py",
        "is_deserted = self._live.isdisjoint(self._held)",
        "is_deserted = False",
        "all wait for ever for a mean that nobody can release",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_rounds.py",
        ),
    ),
    Mutation(
        "ps-a-mean-ends-before-it-has-come",
        "ps",
        "ps/server/core/migration.py",
        """\
        if unit.stands_still and unit.rounds is not None:
            unit.rounds.limit(_MOVE, _NOWHERE)
""",
        "",
        "a partition changes before its old server has let it go",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-what-waited-for-values-goes-last",
        "ps",
        "ps/server/core/unit.py",
        "return 0 if self.stands_still else",
        "return -1 if self.stands_still else",
        "a push that came before the values is lost after a move that failed",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-what-waits-stays-behind",
        "ps",
        "ps/server/core/migration.py",
        "back = [] if before is None else before.give_back()",
        "back: list[Any] = []",
        "what waits for a round while its partition moves is never answered",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-an-older-view-holds-up-this-one",
        "ps",
        "ps/server/core/core.py",
        "if not is_old and self.migration.keeps(",
        "if self.migration.keeps(",
        "a push that comes again late stops the moves, and all who wait for them",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-clocks-are-believed-after-a-move",
        "ps",
        "ps/server/core/migration.py",
        'unit.fence = {rank: clock for rank, clock in content["clocks"] if rank in unnoted}',
        "unit.fence = {}",
        "a bounded read lacks pushes that came back from a move",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-pushes-of-who-left-are-dropped",
        "ps",
        "ps/server/core/unit.py",
        """\
            if each.then.request.source != rank or (isinstance(each.then, Retry) and not is_dead)
""",
        """\
            if each.then.request.source != rank
""",
        "a push counts in some blocks, and not in those that had no values yet",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_waiting_requests.py",
        ),
    ),
    Mutation(
        "ps-a-pause-outlives-its-owner",
        "ps",
        "ps/control/commands.py",
        "return has_ended or owner_of(self.number) in job.left",
        "return has_ended",
        "nothing moves any more once a rank has left within a snapshot",
        (
            "unit/test_ps_agreement.py",
            "unit/test_ps_paused_moves.py",
        ),
    ),
    Mutation(
        "ps-a-moment-outlives-its-owner",
        "ps",
        "ps/control/commands.py",
        "        yield Order(_all_servers(job, [self.number, keeps]), LET)\n        return why\n",
        "        return why\n",
        "servers keep what was held for a snapshot that is over",
        ("unit/test_ps_agreement.py", "unit/test_ps_paused_moves.py"),
    ),
    Mutation(
        "ps-a-moment-lists-tables-of-later",
        "ps",
        "ps/control/commands.py",
        'yield Told({**moment, "rounds": dict(rounds)})',
        'yield Told({**_moment(job), "rounds": dict(rounds)})',
        "a checkpoint names a table of which some servers have written nothing",
        ("unit/test_ps_agreement.py",),
    ),
    Mutation(
        "ps-a-snapshot-waits-for-rounds-after-its-end",
        "ps",
        "ps/control/agreement.py",
        "            running.until = lambda: not running.orders or is_enough()\n",
        "            running.until = None\n",
        "who gives up a snapshot that waits for a slow worker cannot leave it",
        ("unit/test_ps_agreement.py", "unit/test_ps_evaluation.py"),
    ),
    Mutation(
        "ps-the-end-of-a-snapshot-is-lost-with-a-server",
        "ps",
        "ps/control/agreement.py",
        "                    self._begin([each], each.command)\n",
        "                    pass\n",
        "an evaluator that ends its snapshot as a server dies waits until the deadline",
        ("unit/test_ps_agreement.py",),
    ),
    Mutation(
        "ps-servers-make-a-table-twice",
        "ps",
        "ps/server/homes/home.py",
        "header.kind not in (FrameKind.RECORD, FrameKind.REPLY)",
        "header.kind not in (FrameKind.RECORD, FrameKind.REPLY, FrameKind.ORDER)",
        "if the server that leads dies as a table is opened, others make it again, empty",
        ("unit/test_ps_replication_model.py",),
    ),
    Mutation(
        "ps-pushes-that-wait-move-as-applied",
        "ps",
        "ps/server/core/unit.py",
        """\
            applied[rank] = min(applied.get(rank, 0), request.header.sequence - 1)
        return applied""",
        """\
            applied[rank] = applied.get(rank, 0)
        return applied""",
        "a push that waited while its partition moved is dropped as one that came again",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_rebalance.py",
        ),
    ),
    Mutation(
        "ps-a-drain-goes-too-far",
        "ps",
        "ps/server/core/migration.py",
        "rounds.reach(_MOVE, at)",
        "rounds.reach(_MOVE, (at[0] + 1, True))",
        "servers move rows between different rounds",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-a-drain-waits-for-the-dead",
        "ps",
        "ps/server/core/rounds.py",
        "if self._goals and self.is_over and self.at < max(self._goals.values()):",
        "if self._goals is None:",
        "rows that move stand still for ever, for servers heard of a death at different times",
        ("unit/test_ps_client_deaths.py", "unit/test_ps_simulated_servers.py"),
    ),
    Mutation(
        "ps-kept-requests-are-overtaken",
        "ps",
        "ps/server/core/migration.py",
        "if frozen.at is not None and origin not in frozen.origins:",
        "if frozen.at is not None:",
        "a push is applied before one that was made before it, while a partition moves",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-memory-is-freed-while-it-is-read",
        "ps",
        "ps/server/core/migration.py",
        """\
return [] if unnoted else self._free(key, epoch)

    def""",
        """\
return self._free(key, epoch)

    def""",
        "a pull reads memory that is another table's by now",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-a-new-table-outruns-a-snapshot",
        "ps",
        "ps/server/core/core.py",
        """\
        self.moments.stop_new(unit)
""",
        "",
        "a snapshot has a table as it was after different rounds",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_evaluation.py",
        ),
    ),
    Mutation(
        "ps-a-moment-is-missed",
        "ps",
        "ps/server/core/snapshot_moments.py",
        "if current > wanted:",
        "if current > wanted + 1:",
        "a snapshot is never whole, and nobody is told",
        ("unit/test_ps_simulated_servers.py",),
    ),
    Mutation(
        "ps-an-answer-is-forgotten",
        "ps",
        "ps/server/core/rounds.py",
        "return number in rounds",
        "return False",
        "a worker that is in a round hears that it is late, and its step counts in some blocks",
        ("unit/test_ps_rounds.py",),
    ),
    Mutation(
        "ps-moves-begin-within-a-pause",
        "ps",
        "ps/control/move_lock.py",
        "return self.is_free and owner == next",
        "return self.moving is None and owner == next",
        "partitions move while a checkpoint is written",
        (
            "unit/test_ps_simulated_servers.py",
            "unit/test_ps_paused_moves.py",
        ),
    ),
    Mutation(
        "ps-a-leave-is-no-confirmation",
        "ps",
        "ps/server/core/migration.py",
        "for key, epoch in [*self._unnoted]:",
        "for key, epoch in [*self._unnoted][:0]:",
        "if a rank leaves right after a move, the memory of what has moved is kept for ever",
        ("unit/test_ps_simulated_servers.py", "unit/test_ps_rebalance.py"),
    ),
    Mutation(
        "ps-a-part-of-a-round-goes-back-to-nobody",
        "ps",
        "ps/control/commands.py",
        "gone := sorted(pending - {*job.live_workers})",
        "gone := sorted(pending - {*job.live_workers} - pending)",
        "a push of a worker that has left is lost while its round waits and its partition moves",
        ("unit/test_ps_agreement.py", "unit/test_ps_work_goes_on_while_rows_move.py"),
    ),
    Mutation(
        "ps-a-part-of-a-round-of-a-worker-that-rests-moves",
        "ps",
        "ps/control/commands.py",
        "gone := sorted(pending - {*job.live_workers})",
        "gone := sorted(pending - {*job.clients()})",
        "a push of a worker that completes no more steps is lost as rows move",
        ("unit/test_ps_agreement.py",),
    ),
    Mutation(
        "ps-a-table-moves-while-it-goes",
        "ps",
        "ps/control/agreement.py",
        """\
        if any(each.performs for each in self._running.values()):
            return None
""",
        "",
        "servers are told that a table moves, behind that it is gone",
        ("unit/test_ps_agreement.py",),
    ),
    Mutation(
        "ps-moves-go-on-for-who-is-gone",
        "ps",
        "ps/control/commands.py",
        """\
            if self.owner in job.left:
                break
            if due""",
        """\
            if due""",
        "partitions move that nobody asks for any more",
        ("unit/test_ps_agreement.py",),
    ),
    Mutation(
        "ps-a-move-waits-for-who-is-gone",
        "ps",
        "ps/control/commands.py",
        "            yield Until(lambda: self._may_go_on(job, left[0]))\n",
        "            yield Until(lambda: job.move_lock.may_move(self.key))\n",
        "a table moves that one server cannot make, and moves of a rank that is gone stay",
        ("unit/test_ps_agreement.py",),
    ),
    Mutation(
        "ps-an-epoch-comes-again",
        "ps",
        "ps/control/commands.py",
        "epoch = table.epoch_of(key) + 1",
        "epoch = table.epoch_of(key) or 1",
        "a request of before a move is carried out after it",
        ("unit/test_ps_agreement.py", "unit/test_ps_simulated_servers.py"),
    ),
    Mutation(
        "ps-a-patient-pause-is-forgotten",
        "ps",
        "ps/control/move_lock.py",
        """\
        del self._waiting[owner]
        self.look()
""",
        """\
        del self._waiting[owner]
""",
        "a checkpoint waits for moves that nobody asks for any more",
        ("unit/test_ps_paused_moves.py",),
    ),
    Mutation(
        "ps-a-server-that-cannot-give-says-nothing",
        "ps",
        "ps/control/commands.py",
        """\
    if why_not := _problems(given):
        return (yield from stay(why_not))
""",
        "",
        "the server that leads ends with KeyError, as another could not send a partition",
        ("unit/test_ps_agreement.py",),
    ),
]
