"""All ranks take a command after the same step, however late they or their messages are."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.engine.control.commands import COMMANDS, Command, parse, split
from ringcomm.engine.control.rounds import ControlRounds, Note, RoundMessage


class Simulation:
    """Ranks that step, and messages that arrive, in any order; those of a pair keep theirs."""

    def __init__(self, size, seed, in_step):
        self.random = random.Random(seed)
        self.ranks = [ControlRounds(rank) for rank in range(size)]
        self.steps = [0] * size
        self.is_inside = [False] * size
        self.wires = {(a, b): [] for a in range(size) for b in range(size)}
        self.taken = [[] for _ in range(size)]
        self.in_step = in_step  # as with allreduce: no rank is a whole step ahead
        self.gone = set()

    def send(self, source, notes):
        for note in notes:
            self.wires[source, note.dest].append(note)

    def propose(self, rank, text):
        self.send(rank, self.ranks[rank].propose(text, range(len(self.ranks)), self.gone))

    def move(self):
        """Let one rank, or one message, advance."""
        moves = [("message", pair) for pair, notes in self.wires.items() if notes]
        moves += [("rank", rank) for rank in range(len(self.ranks)) if self.may_move(rank)]
        kind, which = self.random.choice(moves)
        if kind == "message":
            source, dest = which
            note = self.wires[which].pop(0)
            if dest not in self.gone:
                self.send(dest, self.ranks[dest].hear(source, note, self.gone))
        elif self.is_inside[which]:
            self.at_boundary(which)
        else:
            self.steps[which] += 1
            self.is_inside[which] = True
            self.ranks[which].enter(self.steps[which])

    def may_move(self, rank):
        if rank in self.gone:
            return False
        is_ahead = self.in_step and self.steps[rank] > min(self.steps)
        return self.is_inside[rank] or not is_ahead

    def at_boundary(self, rank):
        rounds = self.ranks[rank]
        self.send(rank, rounds.settle(self.gone))
        for text, _ in rounds.take_due():
            self.taken[rank].append((text, self.steps[rank]))
        if not rounds.must_hold and not rounds.has_due:
            rounds.leave()
            self.is_inside[rank] = False

    def run_until(self, is_enough, limit=20_000):
        for _ in range(limit):
            if is_enough():
                return
            self.move()
        raise AssertionError(f"stuck: steps {self.steps}, taken {self.taken}")


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 10**9),
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.booleans(),
)
def test_all_ranks_take_the_commands_at_the_same_steps(size, seed, gaps, in_step):
    simulation = Simulation(size, seed, in_step)
    for number, gap in enumerate(gaps):
        for _ in range(gap):
            simulation.move()
        # `ringcomm ctl` gives the next command when there is an answer; the rank is at a boundary.
        simulation.run_until(lambda: simulation.is_inside[0])
        simulation.propose(0, f"command {number}")
        simulation.run_until(lambda n=number: len(simulation.taken[0]) == n + 1)
    simulation.run_until(lambda: all(len(each) == len(gaps) for each in simulation.taken))
    assert all(each == simulation.taken[0] for each in simulation.taken), simulation.taken
    assert [text for text, _ in simulation.taken[0]] == [f"command {n}" for n in range(len(gaps))]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), st.integers(0, 10**9))
def test_commands_on_two_ranks_at_once_end_neither(size, seed):
    simulation = Simulation(size, seed, in_step=False)
    for rank in (0, 1):
        simulation.run_until(lambda r=rank: simulation.is_inside[r])
        simulation.propose(rank, f"of {rank}")
    simulation.run_until(lambda: all(len(each) == 2 for each in simulation.taken))
    steps = [dict(each) for each in simulation.taken]
    assert all(each == steps[0] for each in steps)


@pytest.mark.parametrize("leaves_after", range(0, 40, 3))
def test_a_rank_that_has_left_is_not_waited_for(leaves_after):
    simulation = Simulation(3, leaves_after, in_step=False)
    simulation.run_until(lambda: simulation.is_inside[0])
    simulation.propose(0, "stop")
    for _ in range(leaves_after):
        simulation.move()
    simulation.gone.add(2)
    simulation.run_until(lambda: simulation.taken[0] and simulation.taken[1])
    assert simulation.taken[0] == simulation.taken[1]


class NewcomerSimulation(Simulation):
    """The last rank begins beside rank 0, which stands still until all others know of it."""

    def __init__(self, size, seed):
        super().__init__(size, seed, in_step=True)
        self.newcomer = size - 1
        self.knows = set()  # who counts it among those that take commands
        self.is_standing = self.has_begun = False
        self.members = {}

    def propose(self, rank, text):
        members = range(len(self.ranks) if rank in self.knows else self.newcomer)
        self.members[text] = members
        self.send(rank, self.ranks[rank].propose(text, members, self.gone))

    def may_move(self, rank):
        if (rank == 0 and self.is_standing) or (rank == self.newcomer and not self.has_begun):
            return False
        return self.is_inside[rank] or self.steps[rank] == min(
            step for r, step in enumerate(self.steps) if r != self.newcomer or self.has_begun
        )

    @property
    def can_move(self):
        return any(map(self.may_move, range(len(self.ranks)))) or any(self.wires.values())

    def move(self):
        if self.is_standing and (not self.can_move or self.random.random() < 0.2):
            ignorant = [r for r in range(self.newcomer) if r not in self.knows]
            self.knows.add(self.random.choice(ignorant))
            if len(ignorant) == 1:
                self.send(0, self.ranks[0].pass_on(self.newcomer))
                self.has_begun, self.is_standing = True, False
        else:
            super().move()

    def begin(self):
        """Let rank 0 stand still, having left a boundary."""
        self.is_standing = True
        self.steps[self.newcomer] = self.steps[0]
        self.ranks[self.newcomer].catch_up(self.steps[0])


@settings(max_examples=200, deadline=None)
@given(st.integers(3, 5), st.integers(0, 10**9), st.integers(0, 30), st.integers(0, 12))
def test_who_begins_beside_a_rank_takes_the_commands_that_it_has_not_taken_yet(
    size, seed, gap, second_gap
):
    """Whether those who have proposed them knew of it, or not."""
    simulation = NewcomerSimulation(size, seed)
    for _ in range(gap):
        simulation.move()
    simulation.run_until(lambda: simulation.is_inside[1])
    simulation.propose(1, "before")
    simulation.run_until(lambda: not simulation.is_inside[0])
    n_missed = len(simulation.taken[0])
    simulation.begin()
    for _ in range(second_gap):
        simulation.move()
    simulation.run_until(lambda: simulation.is_inside[1])
    simulation.propose(1, "after")
    simulation.run_until(lambda: all(len(each) == 2 for each in simulation.taken[:-1]))
    assert all(dict(each) == dict(simulation.taken[0]) for each in simulation.taken[:-1])
    expected = dict(simulation.taken[0][n_missed:])
    simulation.run_until(lambda: len(simulation.taken[-1]) == len(expected))
    for _ in range(200):
        simulation.move()
    assert len(simulation.taken[-1]) == len(expected)
    for text, step in simulation.taken[-1]:
        # Who is told of it by rank 0 alone has promised nothing, and may have gone on.
        is_member = simulation.newcomer in simulation.members[text]
        assert step == expected[text] or (step > expected[text] and not is_member)


def test_no_rank_begins_a_step_while_the_step_is_not_agreed_on():
    rounds = ControlRounds(1)
    rounds.enter(7)
    (promise,) = rounds.hear(0, Note(1, RoundMessage.PROPOSED, 5, text="pause"))
    assert (promise.phase, promise.step) == (
        RoundMessage.PROMISED,
        6,
    )  # it may be taken here, after 7
    assert rounds.must_hold
    assert not rounds.take_due()
    rounds.hear(0, Note(1, RoundMessage.AGREED, 5, step=9))
    assert not rounds.must_hold
    assert not rounds.take_due()
    rounds.leave()
    rounds.enter(9)
    assert rounds.take_due() == [("pause", False)]


def test_a_step_is_not_held_for_a_rank_that_died_before_it_told_all_at_which_step():
    rounds = ControlRounds(1)
    rounds.enter(7)
    rounds.hear(0, Note(1, RoundMessage.PROPOSED, 5, text="stop"))
    assert rounds.settle({2}) == []
    assert rounds.must_hold
    assert rounds.settle({0, 2}) == []
    assert not rounds.must_hold
    assert rounds.leave()


# --- commands -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("pause", Command("pause")),
        ("scale 3", Command("scale", n=3)),
        ("set lr=1e-3", Command("set", "lr", "1e-3")),
        ("set note=a b", Command("set", "note", "a b")),
        ("timeline stop", Command("timeline", value="stop")),
    ],
)
def test_a_command_is_read_as_it_is_written(text, command):
    assert parse(split(text)) == command
    assert command.text == text


@pytest.mark.parametrize(
    "words",
    [
        [], [""], ["rm", "-rf"], ["pause", "now"], ["Pause"], ["scale"], ["scale", "0"],
        ["scale", "-1"], ["scale", "٣"], ["scale", "9" * 12], ["set"], ["set", "lr"], ["set", "=1"],
        ["set", "lr="], ["set", "os.x=1"], ["set", "a=b\nc"], ["set", "a= b"], ["timeline", "on"],
        ["set", "a=" + "x" * 300], ["stop", ";", "ls"],
    ],
)  # fmt: skip
def test_anything_else_is_no_command(words):
    with pytest.raises(ValueError, match=r"\w"):
        parse(words)


def test_a_word_of_the_caller_with_more_words_is_not_called_unknown():
    with pytest.raises(ValueError, match=r"^usage: stacks$"):
        parse(["stacks", "now"], others=("stacks",))
    with pytest.raises(ValueError, match=r"'stack' is no command; .* timeline, stacks$"):
        parse(["stack"], others=("stacks",))


def test_each_command_of_the_list_can_be_read():
    arguments = {"scale": ["2"], "set": ["a=1"], "timeline": ["start"]}
    assert [parse([word, *arguments.get(word, [])]).word for word in COMMANDS] == [*COMMANDS]
