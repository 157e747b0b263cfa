"""A feature beside its neighbour: rules that either of the two keeps while it is alone."""

import itertools
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from harness import listen, run_ranks, wait_until
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm._core import StatusPage
from ringcomm.codec import TopK
from ringcomm.data import ShardedSampler
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM, Program
from ringcomm.engine.control.step_boundary import Control
from ringcomm.launch.job.processes import local_ranks
from ringcomm.ps.client.dense.compression import Packer
from ringcomm.ps.client.first_of import FirstOfRounds, PendingPush
from ringcomm.ps.compression import spec_of
from ringcomm.ps.protocol.frames import Status
from ringcomm.ps.table_spec import Spec
from ringcomm.ps.update_modes import Mode
from ringcomm.status.page_enums import Mail


# --- join() beside the steps that commands count, and beside groups -----------------------------
class Commanded:
    """A rank whose commands set a rate of its own: ranks that are threads share one Program."""

    def __init__(self, rank, size=2):
        self.n_steps, self.taken = 0, []
        self.page = StatusPage.create(
            job="test", host="here", rank=rank, size=size, local_rank=rank, nonce=7
        )
        program = Program()
        program.add_rate(lambda: lambda rate: self.taken.append((rate, self.n_steps)))
        this = engine()
        this.page = self.page
        this.control = Control(this, this.groups, program)

    def command(self, text):
        assert self.page.take_mailbox(os.getpid())
        self.page.put_command(text)


@pytest.mark.parametrize("before", [0, 2])
def test_a_command_lands_at_one_step_on_ranks_that_missed_others_in_join(before):
    """Whether the rank had counted a step before it joined, or none."""

    def body(rank):
        mine = Commanded(rank)

        def step():
            mine.n_steps += 1
            engine().control.come_to_boundary(mine, mine.n_steps)

        for _ in range(before if rank else before + 3):
            step()
        rc.join()
        mine.n_steps = before + 3  # as after broadcast_optimizer_state()
        step()
        if rank == 0:
            mine.command("set lr=0.5")
        for _ in range(4):
            rc.barrier()  # so neither is a step ahead
            step()
        return mine.taken

    one, two = run_ranks(2, body)
    assert one == two
    assert one in ([(0.5, before + 5)], [(0.5, before + 6)])  # as soon as both can


WORDS = ("pause", "resume", "checkpoint", "set lr=0.5")


def answer_to(page, text):
    """Return the answer to a command, as `ringcomm ctl` does."""
    assert page.take_mailbox(os.getpid())
    page.put_command(text)
    wait_until(lambda: Mail(page.mail) is Mail.ANSWERED, text)
    answer = page.answer
    page.give_mailbox_back()
    return answer.split(" after ")[0]


def expected_of(words):
    """Return the answers to commands, the last of which is stop, and how many checkpoints."""
    is_paused, answers, n_saved = False, [], 0
    for word in words:
        if word in {"pause", "resume"} and is_paused is (word == "pause"):
            answers.append(f"no the job is {'paused already' if is_paused else 'not paused'}")
            continue
        is_paused = word == "pause" or (is_paused and word not in {"resume", "stop"})
        n_saved += word in {"checkpoint", "stop"}
        done = {"pause": "paused", "resume": "goes on", "checkpoint": "checkpoint written"}
        answers.append("ok " + done.get(word, "stops" if word == "stop" else "lr is 0.5"))
    return answers, n_saved


def test_a_job_that_is_to_stop_ends_whatever_commands_came_before():
    """Also in a pause. The program ends itself, as rc.should_stop() tells it to."""

    def body(_):
        mine, owner = Commanded(0, size=1), Owner()
        for words in itertools.product(WORDS, repeat=2):
            program, saved, answers = Program(asks_to_stop=True), [], []
            program.checkpoints.append(saved.append)
            program.add_rate(lambda: lambda _: None)
            control, has_ended = Control(engine(), engine().groups, program), threading.Event()

            def command(words=words, answers=answers, has_ended=has_ended):
                answers += [answer_to(mine.page, word) for word in (*words, "stop")]
                if not has_ended.wait(10):
                    answers.append("and waits")
                    answer_to(mine.page, "resume")

            commander = threading.Thread(target=command)
            commander.start()
            for n_steps in itertools.count(1):
                control.come_to_boundary(owner, n_steps)
                if program.is_stopping:
                    break
            has_ended.set()
            commander.join()
            assert (answers, len(saved)) == expected_of([*words, "stop"]), words
            assert not mine.page.snapshot()["is_paused"], words

    run_ranks(1, body)


class Owner:
    """What steps."""


def test_steps_count_alike_whenever_a_rank_notices_that_an_optimizer_is_gone():
    def body(rank):
        control, counts = engine().control, []
        olds, other = [Owner()], Owner()
        control.come_to_boundary(other, 1)
        for number in (1, 2):
            control.come_to_boundary(olds[0], number)
        if rank == 1:
            olds.clear()
        for number in (2, 3, 4):
            control.come_to_boundary(other, number)
            counts.append(control.n_steps)
        return counts

    one, two = run_ranks(2, body)
    assert one == two == [2, 3, 4]


@pytest.mark.parametrize("n", [2, 3])
def test_of_optimizers_that_step_in_turn_the_last_counts(n):
    """Else what is saved after its step has one of some of them, and lacks that of the others."""

    def body(rank):
        control, optimizers = engine().control, [Owner() for _ in range(n)]
        counts = []
        for number in range(1, 6):
            for each in optimizers:
                control.come_to_boundary(each, number)
                counts.append(control.n_steps)
        return counts

    expected = [1] * n  # the first step, in which nobody knows yet who comes
    for number in range(2, 6):
        expected += [number - 1] * (n - 1) + [number]
    assert run_ranks(2, body) == [expected] * 2


def test_where_a_program_calls_step_no_optimizer_counts():
    """Such as one that steps five times in a row, and another one once."""

    def body(rank):
        control, program, often, seldom = engine().control, Owner(), Owner(), Owner()
        counts = []
        for number in range(1, 5):
            for inner in range(5):
                control.come_to_boundary(often, 5 * (number - 1) + inner + 1)
            control.come_to_boundary(seldom, number)
            before = control.n_steps
            control.complete_step_of(program)
            counts.append(control.n_steps - before)
        return counts

    assert run_ranks(2, body) == [[0, 1, 1, 1]] * 2


@pytest.fixture
def no_steps(monkeypatch):
    """Let the program of this process have made no step."""
    monkeypatch.setattr(PROGRAM, "n_steps", 0)
    monkeypatch.setattr(PROGRAM, "n_before", 0)


def test_steps_are_counted_on_from_those_of_an_earlier_start_and_never_back(no_steps):
    def body(_):
        this, counts = engine(), []
        this.page = StatusPage.create(
            job="test", host="here", rank=0, size=1, local_rank=0, nonce=7
        )

        def shown():
            counts.append((PROGRAM.n_steps, int(this.page.snapshot()["step"])))

        rc.step()
        shown()
        this.control.go_on_from(240)
        shown()
        rc.step()
        shown()
        this.control.go_on_from(240)
        rc.step(300)  # after a checkpoint of the program's own
        shown()
        rc.step(7)  # as after a loss, where steps are made again
        rc.step()
        shown()
        for step, error in ((0, ValueError), (1 << 63, ValueError), (1.5, TypeError)):
            with pytest.raises(error):
                rc.step(step)
        shown()
        return counts

    (counts,) = run_ranks(1, body)
    assert counts == [(n, n) for n in (1, 240, 241, 300, 302, 302)]


@pytest.mark.parametrize("at", ["in the step in which it comes", "later"])
def test_a_worker_that_has_taken_a_place_takes_commands_at_the_clock_of_the_others(at):
    """The chief lets it in between two steps, before the boundary of the first of them."""
    clock = 5

    def body(rank):
        mine = Commanded(rank)
        this = engine()
        this.control.workers = lambda: (0, 1)

        def complete(number):
            mine.n_steps = number
            this.control.come_to_boundary(mine, number)

        if rank == 0:
            for number in range(1, clock):
                complete(number)
        rc.barrier()
        if rank == 1:
            this.control.catch_up(clock)
        rc.barrier()
        if rank == 0:
            if at != "later":
                mine.command("set lr=0.5")
            complete(clock)
        for number in range(clock + 1, clock + 6):
            rc.barrier()
            if rank == 0 and at == "later" and number == clock + 2:
                mine.command("set lr=0.5")
            complete(number)
        return mine.taken

    one, two = run_ranks(2, body)
    assert one == two
    assert [rate for rate, _ in one] == [0.5]


def test_who_was_in_join_is_forgotten_when_all_have_left_it():
    def body(rank):
        this = engine()
        if rank == 0:
            rc.allreduce(np.ones(1))
            this.seen_in_join = (1,)  # as a reduction of gradients says
        rc.join()
        return this.seen_in_join

    assert run_ranks(2, body) == [(), ()]


@pytest.mark.parametrize("is_begun_before", [True, False])
def test_who_joins_is_not_asked_into_a_group_that_it_is_not_in(is_begun_before):
    has_begun, has_joined, is_known = (threading.Event() for _ in range(3))

    def body(rank):
        group = rc.Group([0, 2])
        if rank == 1:
            if is_begun_before:
                assert has_begun.wait(120)
            has_joined.set()
            return rc.join(), []
        if rank == 0 and is_begun_before:
            handle = rc.allreduce_async(np.array([rank]), group=group)
            has_begun.set()
        else:
            assert (is_known if is_begun_before else has_joined).wait(120)
        listen(lambda: engine()._joined.has_guests)
        is_known.set()
        if rank == 2 or not is_begun_before:
            handle = rc.allreduce_async(np.array([rank]), group=group)
        return rc.join(), [handle.wait().item()]

    (_, first), (_, none), (_, last) = run_ranks(3, body)
    assert (first, none, last) == ([2], [], [2])


# --- error feedback beside rounds that do without a push ----------------------------------------
class PushedBlock:
    """The only block of a table with rounds and error feedback, as its worker pushes it."""

    def __init__(self):
        compression = spec_of("table", TopK(0.25), None, error_feedback=True)
        updater, mode = ps.optim.SGD(1.0).to_json(), Mode("first_of", 1)
        spec = Spec("w", "dense", "float32", (8,), updater, mode, 8, 0.0, 1, {}, compression)
        self.packer = Packer.of(spec, sender=0)

    def push(self, gradient):
        """Push it; return the function that takes the status of the server's reply."""
        memory = {0: np.empty(1000, np.uint8)}
        _, on_reply = self.packer.packing(1.0, memory, lambda _: ())(0, gradient, lambda _: None)
        return lambda status: on_reply(SimpleNamespace(header=SimpleNamespace(status=status)))

    @property
    def kept(self):
        out = np.zeros(8, np.float32)
        self.packer.write_residual(out, [0, 8], 1.0)
        return out


@pytest.mark.parametrize("order", ["late skipped", "skipped late"])
def test_a_push_that_is_late_in_a_round_that_is_skipped_is_kept_once(order):
    block = PushedBlock()
    gradient = np.arange(1, 9, dtype=np.float32)
    answer = block.push(gradient)
    for each in order.split():
        if each == "late":
            answer(Status.LATE)
        else:
            block.packer.take_all_back()
    np.testing.assert_array_equal(block.kept, gradient)


def test_a_push_that_is_late_after_the_values_were_replaced_is_dropped():
    block = PushedBlock()
    old, new = (np.arange(1, 9, dtype=np.float32) * k for k in (1, 100))
    answer = block.push(old)
    block.packer.forget()
    answer_to_new = block.push(new)
    answer(Status.LATE)
    answer_to_new(Status.LATE)
    np.testing.assert_array_equal(block.kept, new)


@pytest.mark.parametrize("nothing", ["None", "weight 0"])
def test_a_skipped_round_without_a_gradient_of_this_worker_keeps_no_earlier_one(nothing):
    steps = np.arange(48, dtype=np.float32).reshape(3, 2, 8) + 1

    def body(rank):
        t = ps.table("w", 8, updater=ps.optim.SGD(1.0), mode="sync", compression=TopK(0.25))
        for k, x in enumerate(steps[:, rank]):
            is_left_out = (k, rank) == (1, 1)
            if is_left_out and nothing == "None":
                t.push(None, hold=True)
            else:
                t.push(x, weight=0 if is_left_out else 1, hold=True)
            t.release(None if k == 1 else 1.0).wait()
        return t.pull().wait(), t.residual

    (values, first), (_, second) = run_workers(2, body)
    counted = steps.sum(axis=(0, 1)) - steps[1, 1]
    np.testing.assert_array_equal(-2 * values + first + second, counted)


def test_rounds_of_tables_that_are_opened_again_are_as_new_ones():
    used, fresh = FirstOfRounds(None), FirstOfRounds(None)
    used.add(3)
    used.round_for(PendingPush(None, 3, [0]))
    used.note_pulled(3, 5)
    assert used.n_missed == 4
    used.restart()
    kept = {name: value for name, value in vars(used).items() if name != "_lock"}
    assert kept == {name: value for name, value in vars(fresh).items() if name != "_lock"}


# --- the mark of a run beside that of another ---------------------------------------------------
def test_the_mark_of_a_run_whose_folder_begins_alike_is_not_that_of_this_one(monkeypatch):
    environ = "A=1\0RINGCOMM_RUN_FOLDER=12 /runs/ab\0B=2"
    monkeypatch.setattr(local_ranks, "read_text", lambda _: environ)
    marked = [
        path
        for path in ("/runs/a", "/runs/ab", "/runs/abc", "/runs/a.")
        if local_ranks._is_marked(12, SimpleNamespace(path=path))
    ]
    assert marked == ["/runs/ab"]


# --- a sampler's states beside shares of unequal length -----------------------------------------
@pytest.mark.parametrize(("n", "size"), [(5, 2), (7, 3), (8, 3), (11, 4)])
def test_states_of_ranks_in_two_epochs_go_on_with_what_is_left_whoever_was_first(n, size):
    """Each rank in turn is the one that is through with its share, and so in the next epoch."""
    for first, others, size_after in itertools.product(range(size), (0, 1), (1, 2, 3)):
        group = samplers(n, size)
        seen = []
        for sampler in group:
            count = len(sampler) if sampler.rank == first else others
            seen += itertools.islice(sampler, count)
        states = [each.state_dict() for each in group]
        assert states[first]["epoch"] == 1
        after = samplers(n, size_after)
        for sampler in after:
            sampler.load_state_dict(states)
            seen += sampler
        assert sorted(seen) == list(range(n)), (first, others, size_after)


POINTS = ["not begun", "begun", "one batch", "one is left", "all taken", "over"]


@pytest.mark.parametrize("point", POINTS)
def test_whenever_a_position_is_taken_the_epoch_goes_on_with_what_is_left(point):
    """In an elastic job, and by states; on fewer ranks or more, whose shares are unequal."""
    for n, size, size_after in itertools.product((5, 9), (1, 2), (1, 2, 3)):
        for by_states in (False, True):
            group, seen = samplers(n, size), []
            for sampler in group:
                iterator = None if point == "not begun" else sampler.batches(2).begin()
                if point not in ("not begun", "begun"):
                    length = len(sampler.batches(2))
                    count = {"one batch": 1, "one is left": length - 1}.get(point, length)
                    seen += itertools.chain(*itertools.islice(iterator, count))
                if point == "over":
                    assert list(iterator) == []
            after = samplers(n, size_after)
            states = [each.state_dict() for each in group]
            for sampler in after:
                if by_states:
                    sampler.load_state_dict(states)
                else:
                    sampler.set_elastic_position(group[0].elastic_position())
            epochs = {each.epoch for each in after}
            assert epochs == {int(len(seen) == n)}, (n, size, size_after, by_states)
            if len(seen) < n:
                seen += itertools.chain(*after)
            assert sorted(seen) == list(range(n)), (n, size, size_after, by_states)


def samplers(n, size):
    return [
        ShardedSampler(n, rank=rank, size=size, remainder="uneven", seed=3) for rank in range(size)
    ]
