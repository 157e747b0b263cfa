"""Faults where ranks of a parameter-server job die, and in the leases of a WorkQueue."""

from mutations.mutation import Mutation

_TESTS = ("unit/test_ps_deaths.py",)
_OF_SERVERS = ("unit/test_ps_lost_servers.py",)
_OF_COPIES = ("unit/test_ps_replication_model.py",)
_WITHOUT_PYTHON = ("unit/test_ps_pushes_to_two_copies.py",)
_IN_PLACE = ("unit/test_ps_reads_of_two_copies.py",)

PS_DEATHS = [
    Mutation(
        "ps-the-dead-contribute",
        "ps",
        "ps/server/core/rounds.py",
        "            self._came[number].pop(worker, None)\n",
        "",
        "a step that never ended counts in some blocks of a round",
        _TESTS,
    ),
    Mutation(
        "ps-a-push-of-the-dead-waits-for-values",
        "ps",
        "ps/server/core/waiting_requests.py",
        "(isinstance(each.then, Retry) and not is_dead)",
        "isinstance(each.then, Retry)",
        "a push of a dead worker is carried out later",
        _TESTS,
    ),
    Mutation(
        "ps-a-request-of-the-dead-is-kept-in-a-move",
        "ps",
        "ps/server/core/migration_participant.py",
        "frozen.kept = [each for each in frozen.kept if each.source != rank]",
        "frozen.kept = [*frozen.kept]",
        "a push of a dead worker is carried out after the move",
        _TESTS,
    ),
    Mutation(
        "ps-a-round-waits-for-the-dead-in-it",
        "ps",
        "ps/server/core/departures.py",
        'table.without.setdefault(number, set()).add(message["worker"])',
        "table.without.setdefault(number, set())",
        "a round of ps.FirstOf never ends if one of its workers died",
        _TESTS,
    ),
    Mutation(
        "ps-a-place-of-the-dead-is-given-away",
        "ps",
        "ps/server/core/rounds.py",
        "        return [*self._rounds.pop(worker, ())]",
        "        self._in[self.current].discard(worker)\n"
        "        return [*self._rounds.pop(worker, ())]",
        "a gradient counts in some blocks, and is late where the dead worker's had come",
        _TESTS,
    ),
    Mutation(
        "ps-first-values-outrun-own-pushes",
        "ps",
        "ps/server/core/unit.py",
        "        return [Write(self.key, request, payload if first else None)]",
        "        header = request.header\n"
        "        self.applied.note_last(header.origin, header.sequence)\n"
        "        return [Write(self.key, request, payload if first else None)]",
        "what a worker pushed before it became the chief is acknowledged, and lost",
        _TESTS,
    ),
    Mutation(
        "ps-unequal-means-move",
        "ps",
        "ps/server/core/migration_leader.py",
        "if len(held) > 1:",
        "if len(held) > 2:",
        "rows move into a held mean of other workers",
        _TESTS,
    ),
    Mutation(
        "ps-the-heir-hears-of-no-stop",
        "ps",
        "ps/end_of_job.py",
        "        elif self._is_asked:\n            self._say_what_is_known(chief)",
        "        elif self._is_asked and self._last is None:\n"
        "            self._say_what_is_known(chief)",
        "if the chief dies within ps.stop(), some workers train on, or for another number of steps",
        _TESTS,
    ),
    Mutation(
        "ps-a-worker-rests-while-rows-move",
        "ps",
        "ps/end_of_job.py",
        '        _settle(client)\n        ask_servers(client, "rest"',
        '        client.wait_until_sent(_LABEL)\n        ask_servers(client, "rest"',
        "after ps.should_stop() a step counts on some servers, and is late on others",
        ("unit/test_ps_row_moves.py",),
    ),
    Mutation(
        "ps-a-chief-that-has-left-follows",
        "ps",
        "ps/roles.py",
        "            self.gone.update(left)",
        "            pass",
        "nobody is the chief",
        _TESTS,
    ),
    Mutation(
        "queue-a-lease-of-the-dead-is-lost",
        "ps",
        "data/leases.py",
        "            heapq.heappush(self._back, self._of.pop(rank))",
        "            self._of.pop(rank)",
        "samples of a dead rank are in no step of the epoch",
        ("unit/test_work_queue.py",),
    ),
    Mutation(
        "queue-a-question-that-comes-twice-takes-two",
        "ps",
        "data/leases.py",
        "        if rank not in self._of:\n",
        "        if True:\n",
        "a part is given out, and nobody works on it",
        ("unit/test_work_queue.py",),
    ),
    Mutation(
        "ps-a-recovery-begins-without-a-worker",
        "ps",
        "ps/server/core/recovery.py",
        "if workers <= met.keys() and",
        "if workers & met.keys() and",
        "a worker goes on with tables that are gone",
        _OF_SERVERS,
    ),
    Mutation(
        "ps-a-recovery-asks-a-server-that-is-dead",
        "ps",
        "ps/server/core/recovery.py",
        "return met.servers == tuple(self._members().server_numbers)",
        "return True",
        "ranks that know different servers recover together",
        _OF_SERVERS,
    ),
    Mutation(
        "ps-the-dead-come-back-in-a-recovery",
        "ps",
        "ps/server/core/departures.py",
        "        self.left.update(left)\n",
        "",
        "rounds wait for workers that died before",
        _OF_SERVERS,
    ),
    Mutation(
        "ps-who-has-left-is-to-restore",
        "ps",
        "ps/server/core/recovery.py",
        '"restores": came[0].request.source',
        '"restores": self._members().workers[0]',
        "if the chief has left, the others wait for ever for somebody who restores",
        ("unit/test_ps_recovery_model.py",),
    ),
    Mutation(
        "ps-steps-go-on-after-a-recovery",
        "ps",
        "ps/checkpoint/recover.py",
        """    current.clock = step if step is not None else manifest["step"] or 0
""",
        "",
        "workers skip the steps that were lost",
        _OF_SERVERS,
    ),
    Mutation(
        "ps-rows-of-before-a-recovery-are-used",
        "ps",
        "ps/client/rows/rows_ahead.py",
        "if session().n_recovered != self.n_recovered:",
        "if False:",
        "rows that were fetched ahead are those of before, or an error of a death that is over",
        _OF_SERVERS,
    ),
    Mutation(
        "ps-residuals-outlive-a-recovery",
        "ps",
        "ps/client/dense/table.py",
        """        self.client.outstanding.forget_table(self.number)
        self.forget_residual()
""",
        "        self.client.outstanding.forget_table(self.number)\n",
        "what compression kept of lost steps counts after a recovery",
        _OF_SERVERS,
    ),
    Mutation(
        "ps-a-primary-waits-for-no-copy",
        "ps",
        "ps/server/homes/home.py",
        "        self._record(self._log.add(entry), entry)\n",
        "        self._record(self._log.add(entry), entry)\n"
        "        self._carry_out(self._log.done(1 << 62))\n",
        "an acknowledged push is lost with its server",
        _OF_COPIES,
    ),
    Mutation(
        "ps-pushes-of-cpp-die-with-the-copy",
        "ps",
        "ps/server/homes/home.py",
        "        self._pushes.complete(self._pushes.last)\n",
        "",
        "a push waits for ever if the copy dies, or what comes behind it overtakes it",
        _WITHOUT_PYTHON,
    ),
    Mutation(
        "ps-reads-overtake-pushes-of-cpp",
        "ps",
        "ps/server/homes/replication.py",
        "        if self.is_quiet:\n",
        "        if not self._kept:\n",
        "a pull misses the push before it",
        _WITHOUT_PYTHON,
    ),
    Mutation(
        "ps-a-new-primary-takes-no-push-without-python",
        "ps",
        "ps/server/homes/home.py",
        "        self._pushes.lead(None)\n        self._behind_s",
        "        self._behind_s",
        "after a death each push costs 20 times as much",
        _WITHOUT_PYTHON,
    ),
    Mutation(
        "ps-a-push-that-python-repeats-is-not-reported",
        "ps",
        "ps/server/homes/home.py",
        "            self._report(record)\n            return\n",
        "            return\n",
        "a push behind a tick is never acknowledged",
        _WITHOUT_PYTHON,
    ),
    Mutation(
        "ps-messages-of-a-dead-home-are-not-sent-again",
        "ps",
        "ps/server/homes/homes.py",
        "                home.post_again(other)\n",
        "                pass\n",
        "who opens a table waits for ever",
        _OF_COPIES,
    ),
    Mutation(
        "ps-a-copy-keeps-no-replies",
        "ps",
        "ps/server/homes/home_link.py",
        "            self.answers.note(dest, header.sequence, sent)\n        if self.is_primary:\n",
        "            if self.is_primary:\n"
        "                self.answers.note(dest, header.sequence, sent)\n"
        "        if self.is_primary:\n",
        "a request that was carried out is not answered once its server is dead",
        _OF_COPIES,
    ),
    Mutation(
        "ps-a-request-that-comes-again-is-carried-out-again",
        "ps",
        "ps/server/homes/home.py",
        "            if came != Came.FIRST:\n                return\n",
        "            if came == Came.WAITS:\n                return\n",
        "a function is called twice if its server dies",
        _OF_COPIES,
    ),
    Mutation(
        "ps-a-successor-begins-before-memory-is-withdrawn",
        "ps",
        "ps/session.py",
        """\
        self.client.link.forget(rank)  # its blocks, before anything is acknowledged in its place
        has_other_chief = layout.lose(rank, peers.left)
""",
        """\
        has_other_chief = layout.lose(rank, peers.left)
        server.on_death(rank) if server is not None else None
        self.client.link.forget(rank)
""",
        "for a moment, who has not heard of a death misses what was acknowledged since",
        ("unit/test_ps_replication.py",),
    ),
    Mutation(
        "ps-the-memory-of-the-dead-is-read",
        "ps",
        "ps/protocol/link.py",
        "            node.memory_of(rank).withdraw()\n",
        "            pass\n",
        "who has not heard of a death misses what was acknowledged since",
        ("unit/test_ps_replication.py",),
    ),
    Mutation(
        "ps-memory-is-read-that-nobody-could-withdraw",
        "ps",
        "ps/server/homes/home_link.py",
        "return all(self._link.shares_memory(rank) for rank in self._layout.servers)",
        "return True",
        "if the copy is on another host, pulls miss what was acknowledged after a death",
        _IN_PLACE,
    ),
    Mutation(
        "ps-a-job-with-servers-begins-another-view",
        "ps",
        "ps/job.py",
        "    engine.extensions.check_views(current.refuse_view)\n",
        "",
        "elastic.run in a job with servers waits for them until the deadline, and then fails",
        (
            "fault/test_ps_deaths.py::"
            "test_a_job_with_servers_goes_on_in_one_view_and_refuses_what_would_begin_another",
        ),
    ),
]
