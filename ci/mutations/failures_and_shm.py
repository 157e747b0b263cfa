"""Faults in what happens when ranks die, leave or are late; and in shared memory."""

from mutations.mutation import Mutation

FAULT = [
    Mutation(
        "stacks-are-asked-for-all-at-once",
        "fault",
        "status/stacks.py",
        "    except BlockingIOError:\n        return False\n",
        "    except BlockingIOError:\n        return True\n",
        "a rank that is late dies of the questions where it is",
        ("unit/test_stacks.py",),
    ),
    Mutation(
        "a-rank-takes-its-own-error-for-that-of-another",
        "fault",
        "status/error_printer.py",
        """    _printed.add(name)
""",
        "",
        "the second thread of a rank that fails in the same way ends without a word",
        ("unit/test_uncaught_errors.py",),
    ),
    Mutation(
        "a-thread-is-left-where-one-lacks",
        "fault",
        "engine/progress/loop.py",
        "self._loop.start_thread()\n            if self._thread is None",
        "threading.Thread(target=self._run, name='ringcomm', daemon=True).start()\n"
        "            self._loop.start_thread()\n"
        "            if self._thread is None",
        "a rank for which there is no more thread aborts at its exit",
        ("unit/test_ringcomm_run_limits.py",),
    ),
    Mutation(
        "names-of-others-are-believed",
        "fault",
        "status/error_printer.py",
        "return _uid_of_peer(asking) == os.geteuid()",
        "return True",
        "another user hides why a job does not start",
        ("unit/test_one_error_for_all.py",),
    ),
    Mutation(
        "frames-of-ringcomm-are-shown",
        "fault",
        "status/error_text.py",
        "if not is_ours or not any(_is_own(each.filename) for each in run):",
        "if True:",
        "one sentence about a wrong argument is lost among 40 lines of ringcomm's frames",
        ("unit/test_uncaught_errors.py",),
    ),
    Mutation(
        "an-excepthook-of-the-program-is-not-called",
        "fault",
        "__init__.py",
        "if sys.excepthook is sys.__excepthook__:",
        "if True:",
        "a program's own hook, set before ringcomm is imported, is not called",
        ("unit/test_uncaught_errors.py",),
    ),
    Mutation(
        "any-death-is-an-obstacle",
        "fault",
        "transport/peer_state.py",
        "dead = {r: why for r, why in self.dead.items() if r in members}",
        "dead = dict(self.dead)",
        "a death outside a group ends the group's operations",
        ("unit/test_transport_peer_state.py", "unit/test_groups.py"),
    ),
    Mutation(
        "verdict-before-the-last-look",
        "fault",
        "engine/progress/task_set.py",
        "self._finish(task, None if self._completes(task) else error)",
        "self._finish(task, error)",
        "an operation that all ranks had completed fails where one of them dies soon after",
        (
            "unit/test_dead_and_late_ranks.py::test_a_death_is_no_failure_for_the_operation_whose_part_was_done",
        ),
    ),
    Mutation(
        "idle-ranks-are-deaf",
        "fault",
        "engine/progress/loop.py",
        "itertools.count(not is_due)",
        "itertools.count(1)",
        "a rank that loads data for long is reported like one that has been stopped",
        (
            "unit/test_dead_and_late_ranks.py::test_a_rank_that_computes_answers_that_it_is_in_no_operation",
        ),
    ),
    Mutation(
        "deadline-of-the-whole",
        "fault",
        "engine/progress/task_set.py",
        """\
                    has_moved = True
                    self._tasks[task] = None
""",
        """\
                    has_moved = True
""",
        "a large operation that moves all the time is ended after RINGCOMM_TIMEOUT_S",
        (
            "unit/test_dead_and_late_ranks.py::test_the_deadline_is_for_a_wait_in_which_nothing_moves",
        ),
    ),
    Mutation(
        "who-waits-elsewhere-is-named-beside-the-silent",
        "fault",
        "engine/progress/deadlines.py",
        """\
    blamed = watch.peers.blamed(task.key, task.members)
    ranks =""",
        """\
    blamed = missing
    ranks =""",
        "a neighbour that itself waits for the dead host is named beside it",
        ("unit/test_dead_and_late_ranks.py",),
    ),
    Mutation(
        "a-standstill-in-cpp-is-not-told",
        "fault",
        "engine/progress/loop.py",
        "stood_s = max(stood_s, in_cpp_s)",
        "stood_s = max(stood_s, 0.0)",
        "MPI keeps a thread in C++, and every rank waits for this one without knowing why",
        ("unit/test_cpp_wire_with_fake_mpi.py",),
    ),
    Mutation(
        "leaving-waits-for-the-dead",
        "fault",
        "engine/progress/deadlines.py",
        "if peers.are_all_gone or peers.is_fatal or now",
        "if peers.are_all_gone or now",
        "a rank that is done waits for survivors of a death, which may go on for hours",
        ("unit/test_dead_and_late_ranks.py::test_a_death_ends_the_wait_of_a_rank_that_leaves",),
    ),
    Mutation(
        "bad-values-are-harmless",
        "fault",
        "engine/core/completion.py",
        "return isinstance(error, MismatchError | ConfigError) or error is work.problem",
        "return isinstance(error, MismatchError | ConfigError | ValueError | TypeError)",
        "after an error in mid-operation a rank goes on, out of step with the others",
        (
            "unit/test_dead_and_late_ranks.py::test_an_error_in_mid_operation_breaks_the_engine_and_tells_the_others",
        ),
    ),
    Mutation(
        "refusal-is-the-end",
        "fault",
        "engine/progress/task_set.py",
        "task.fault_until = time.monotonic() + _CONFIRM_S",
        "task.fault_until = time.monotonic()",
        "a death that the wire notices first is told as a refused message, without the rank",
        (
            "unit/test_dead_and_late_ranks.py::test_a_death_that_the_wire_notices_first_is_told_as_one",
        ),
    ),
    Mutation(
        "whoever-leaves-first",
        "fault",
        "engine/progress/deadlines.py",
        "is_alone = bool(awaited) and all(r in watch.peers.left for r in awaited)",
        "is_alone = any(r in watch.peers.left for r in awaited)",
        "recv(ANY_SOURCE) fails when one of several possible senders is done",
        ("unit/test_send_recv.py",),
    ),
    Mutation(
        "follower-is-blamed",
        "fault",
        "transport/presence.py",
        """\
            blames = last_words["end_code"]
""",
        """\
            blames = number
""",
        "the report blames a rank that only followed another one's failure",
        ("unit/test_status_page_and_guardian.py",),
    ),
    Mutation(
        "rank-aborted-by-mpi-is-the-cause",
        "fault",
        "launch/job/verdict.py",
        "_SUREST.index(_kind(failure)), failure.time_ns",
        "failure.code == 143, failure.time_ns",
        "a rank that MPI aborted for another host's failure is named the cause",
        ("unit/test_ringcomm_run.py",),
    ),
    Mutation(
        "program-that-fails-is-started-again",
        "fault",
        "launch/job/verdict.py",
        "if has_failed or Evidence.OWN in kinds.values():",
        "if has_failed:",
        "a program that raises on all ranks is started again as if they had been killed",
        ("unit/test_ringcomm_run_endings.py",),
    ),
    Mutation(
        "servers-alone-complete-a-job",
        "fault",
        "launch/job/verdict.py",
        "len(_good_workers(e)) >= e.least",
        "bool(e.ends)",
        "a job whose workers have all failed is complete if its servers end well",
        ("unit/test_ringcomm_run_endings.py",),
    ),
    Mutation(
        "ranks-let-all-processes-in",
        "node",
        "transport/node/private_memory.py",
        "while pid > _INIT:",
        "while pid > 0:",
        "ranks without a launcher in common let all processes of the user read and trace them",
        ("unit/test_private_memory.py",),
    ),
    Mutation(
        "who-reads-nobody-lets-others-in",
        "node",
        "engine/core/context.py",
        "if transport.node is not None and settings.read_memory:",
        "if transport.node is not None:",
        "RINGCOMM_READ_MEMORY=0 opens ranks all the same",
        ("unit/test_private_memory.py",),
    ),
    Mutation(
        "reads-that-the-user-forbids",
        "node",
        "engine/executors/mail.py",
        "may_read=bool(engine.settings.read_memory)",
        "may_read=True",
        "RINGCOMM_READ_MEMORY=0 has no effect",
        ("unit/test_send_recv.py",),
    ),
    Mutation(
        "check-believes-that-reads-work",
        "node",
        "launch/check_install/gather_facts.py",
        "return Reading(number and errno.errorcode.get(number, str(number)), ptrace_scope=scope)",
        'return Reading("", ptrace_scope=scope)',
        "`ringcomm check` says that long messages are copied once where they are not",
        ("unit/test_ringcomm_check_on_this_machine.py",),
    ),
    Mutation(
        "senders-have-the-numbers-of-another-group",
        "node",
        "engine/executors/mail.py",
        "            return self._places[rest] if type(rest) is int else rest\n",
        "            return rest\n",
        "recv() in a group returns a rank of the job, from the second message of a kind on",
        ("unit/test_send_recv.py",),
    ),
    Mutation(
        "messages-to-the-dead-begin",
        "node",
        "engine/executors/mail.py",
        "return not self._state.is_usable or self._peers.has_lost",
        "return not self._state.is_usable",
        "a short message to a rank that has died counts as sent",
        ("unit/test_messages_that_go_wrong.py",),
    ),
    Mutation(
        "short-messages-pass",
        "fault",
        "transport/mpi.py",
        "if self._expected and not self._requests:",
        "if self._expected < 0 and not self._requests:",
        "a message that comes short leaves what was in the buffer before, without an error",
        ("mpi/test_spmd_suite.py",),
    ),
    Mutation(
        "moves-do-not-count",
        "fault",
        "transport/channel.py",
        "return self._running.test() or self._run.moves != self._seen",
        "return self._running.test()",
        "a long operation is given up at its deadline although it goes on",
        ("unit/test_recording.py",),
    ),
    Mutation(
        "quiet-refusal",
        "fault",
        "engine/core/usable_or_broken.py",
        "elif not isinstance(error, CommTimeoutError):",
        "elif not isinstance(error, RingcommError):",
        "ranks wait out their deadline for one whose engine is broken",
        ("unit/test_dead_and_late_ranks.py::test_a_message_that_the_wire_refuses_is_told_to_all",),
    ),
]

NODE = [
    Mutation(
        "inboxes-are-filled-by-others",
        "node",
        "transport/node/node_discovery.py",
        "self._let_in_with_key()",
        "pass",
        "another user keeps ranks in containers from sharing memory",
        ("unit/test_node_discovery.py",),
    ),
    Mutation(
        "messages-of-others-blame-the-limit",
        "node",
        "transport/node/node_discovery.py",
        "            if is_for_us:\n",
        "            if flags & socket.MSG_CTRUNC:\n",
        "advice to raise `ulimit -n`, which helps nothing",
        ("unit/test_node_discovery.py",),
    ),
    Mutation(
        "left-unnoticed-between-hosts",
        "fault",
        "engine/executors/routes.py",
        "work.task.asks_who_left = True",
        "pass",
        "between hosts, a rank waits for one that has left until its deadline",
        (
            "unit/test_dead_and_late_ranks.py::test_who_has_left_is_asked_at_once_and_not_only_at_a_warning_or_the_deadline",
        ),
    ),
    Mutation(
        "left-unnoticed-in-memory",
        "fault",
        "engine/progress/deadlines.py",
        "gone = [r for r in task.late if r in watch.peers.left]",
        "gone = [r for r in task.late if r in watch.peers.dead]",
        "a rank that left is waited for in shared memory until the deadline",
        ("unit/test_collectives_in_shared_memory.py",),
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
        ("unit/test_collectives_in_shared_memory.py",),
    ),
    Mutation(
        "disagreement-is-done",
        "cache",
        "engine/executors/short_calls.py",
        """\
                if step is None:
                    if name is None:""",
        """\
                if step is None or step.is_over:
                    if name is None:""",
        "an allreduce of other shapes on another rank reduces nothing and says nothing",
        ("unit/test_calls_made_again.py",),
    ),
    Mutation(
        "disagreement-in-place-is-done",
        "cache",
        "engine/executors/short_calls.py",
        """\
            if step is None:
                self._team.end_turn(place)""",
        """\
            if step is None or step.is_over:
                self._team.end_turn(place)""",
        "an allreduce_ of other shapes on another rank reduces nothing and says nothing",
        ("unit/test_calls_made_again.py",),
    ),
    Mutation(
        "a-long-payload-counts-as-gone-along",
        "wire",
        "engine/executors/routes.py",
        "return await (plan.end(t) if step.is_whole else plan.move(t))",
        "return await plan.end(t)",
        "between hosts, a call of more than a few KiB returns what was in its result before",
        ("unit/test_calls_made_again.py",),
    ),
    Mutation(
        "a-step-by-messages-takes-no-turn",
        "order",
        "transport/wire_team.py",
        """\
        if self._neighbours is not None:
            self._neighbours.end_turn(place)""",
        """\
        if self._neighbours is None:
            return""",
        "between hosts with several ranks, the calls after some short ones wait for ever",
        ("unit/test_calls_made_again.py",),
    ),
    Mutation(
        "a-forced-algorithm-is-passed-by",
        "wire",
        "engine/executors/routes.py",
        "plan.step is None or self._selection.leaves_memory:",
        "plan.step is None:",
        "RINGCOMM_ALGORITHM has no effect on short payloads between hosts",
        ("unit/test_explain_and_forced_algorithms.py",),
    ),
    Mutation(
        "a-known-call-has-any-root",
        "cache",
        "engine/executors/short_calls.py",
        "(kind, x.dtype, x.shape or type(x), op, root)",
        "(kind, x.dtype, x.shape or type(x), op, 0)",
        "the second broadcast of a shape gets the values of the first one's root",
        ("unit/test_calls_made_again.py",),
    ),
    Mutation(
        "a-known-result-is-made-once",
        "cache",
        "engine/executors/short_calls.py",
        "return partial(np.empty, result.shape, result.dtype)",
        "return lambda: result",
        "a call overwrites the result of the one before",
        ("unit/test_calls_made_again.py",),
    ),
    Mutation(
        "view-loses-its-memory",
        "order",
        "engine/api/registered_arrays.py",
        "return np.empty(lengths, kind) if data is None else data.view(kind).reshape(lengths)",
        "return np.empty(lengths, kind)",
        "registered arrays are ordinary ones, and every allreduce takes four passes",
        ("unit/test_collectives_in_shared_memory.py",),
    ),
]
