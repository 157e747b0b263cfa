"""Faults where clients of a parameter server die, and in the leases of a WorkQueue."""

from mutations.mutation import Mutation

_TESTS = ("unit/test_ps_deaths.py",)

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
        "        self.applied.note_last(header.origin, header.incarnation, header.sequence)\n"
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
]
