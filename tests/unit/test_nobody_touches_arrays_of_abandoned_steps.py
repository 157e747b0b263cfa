"""A rank that gives up an operation in its node's memory: nobody touches what is its own again.

Deadlines and interrupts, arrays of every kind, blocking and not, of all ranks and of a part.
"""

import os
import threading

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm import _core
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.progress.loop import Progress
from ringcomm.transport.node.shared_memory import make_memory

MINE = 777  # what a rank writes once an operation of its own has failed
# Inline, one piece in place, and segments through lanes.
ARRAYS = {"inline": (1000, False), "registered": (70_001, True), "staged": (70_001, False)}


@pytest.fixture(autouse=True)
def on_one_node(monkeypatch):
    monkeypatch.setattr("harness.wire", "node")


def array(kind, value):
    count, is_registered = ARRAYS[kind]
    x = rc.empty(count, np.float32) if is_registered else np.empty(count, np.float32)
    x[:] = value
    return x


@pytest.fixture
def interrupt_rank_0(monkeypatch):
    """Return what lets the next nap of rank 0 that waits end with an interrupt, as Ctrl-C does."""
    park = Progress._park
    is_due = threading.Event()

    def nap(self, nap_s, *, is_background):
        park(self, nap_s, is_background=is_background)
        if self._transport.rank == 0 and not is_background and is_due.is_set():
            is_due.clear()
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "_park", nap)
    return is_due.set


@pytest.mark.parametrize("kind", ARRAYS)
@pytest.mark.parametrize("how", ["blocking", "named", "part"])
@pytest.mark.parametrize("why", ["deadline", "interrupt"])
def test_who_comes_after_a_rank_gave_up_touches_nothing(interrupt_rank_0, kind, how, why):
    has_given_up = threading.Event()
    arrays = []

    def reduce(x, group):
        if how == "named":
            rc.allreduce_async_(x, name="w").wait()
        else:
            rc.allreduce_(x, group=group)

    def body(rank):
        group = rc.Group([0, 2]) if how == "part" else None
        if group is not None and rank == 1:
            return
        for _ in range(3):  # the short way, and a name that is agreed on
            reduce(x := array(kind, 1), group)
            assert (x == (2 if group else 3)).all()
        x = array(kind, rank + 1)
        errors = rc.CommTimeoutError if why == "deadline" else rc.PeerFailedError
        if rank == 0 and why == "interrupt":
            errors = KeyboardInterrupt
            interrupt_rank_0()
        if rank == 2:
            assert has_given_up.wait(120)
        with pytest.raises(errors) as caught:
            reduce(x, group)
        x[:] = MINE
        arrays.append(x)
        if rank == 0:
            has_given_up.set()
        elif why == "interrupt":
            assert "rank 0 broke off" in str(caught.value)
            assert "KeyboardInterrupt" in str(caught.value)
        elif rank == 2:
            assert "has waited" in str(caught.value)
            assert 2 in caught.value.missing
        with pytest.raises(rc.RingcommError):
            reduce(array(kind, 1), group)

    run_ranks(3, body, settings=Settings(timeout_s=0.3 if why == "deadline" else 20))
    for x in arrays:
        assert (x == MINE).all(), "memory was written after its operation had failed"


def test_all_that_is_under_way_is_given_up_with_the_operation_that_fails(interrupt_rank_0):
    has_given_up = threading.Event()

    def body(rank):
        names = ["a", "b", "c"]
        for name in names:
            rc.allreduce_async_(array("registered", 1), name=name).wait()
        rc.barrier()
        xs = [array("registered", 1) for _ in names]
        if rank == 1:
            assert has_given_up.wait(120)
            for name, x in zip(names, xs, strict=True):
                with pytest.raises(rc.PeerFailedError, match="rank 0 broke off"):
                    rc.allreduce_async_(x, name=name).wait()
            return xs
        handles = [rc.allreduce_async_(x, name=name) for name, x in zip(names, xs, strict=True)]
        interrupt_rank_0()
        with pytest.raises(KeyboardInterrupt):
            handles[1].wait()
        for x in xs:
            x[:] = MINE
        has_given_up.set()
        return xs

    for x in run_ranks(2, body)[0]:
        assert (x == MINE).all()


def test_nothing_goes_the_short_way_once_a_rank_is_known_to_have_given_up():
    def body(rank):
        for _ in range(3):
            rc.allreduce_(x := array("inline", 1))
        rc.barrier()
        current = engine()
        assert not current._needs_task()
        rc.barrier()  # both have looked
        if rank == 0:
            current.watch.peers.note_broken(1, 1, "failed")
            assert current._needs_task()
            with pytest.raises(rc.PeerFailedError, match="rank 1"):
                rc.allreduce_(x)
            assert (x == 2).all()  # nothing was begun
        else:
            with pytest.raises(rc.PeerFailedError, match="this rank failed"):
                rc.allreduce_(x)

    run_ranks(2, body)


# --- steps, as C++ has them -----------------------------------------------------------------------
SLOT = 20  # of a name
TO_ALL, SUM, FLOAT32 = 0, 0, 2


class Two:
    """Two ranks of a node, in one thread."""

    def __init__(self):
        self.memories = [make_memory(nonce, 2) for nonce in (1, 2)]
        self.teams = [_core.make_team(r, 0, True, self.memories) for r in range(2)]

    def array(self, rank, value):
        x = _core.take(self.memories[rank], 4 * 70_001).view(np.float32)
        x[:] = value
        return x

    def start(self, rank, x, slot=SLOT):
        raw = x.view(np.uint8)
        return _core.start_reduce(
            self.teams[rank], slot, 42, raw, raw, [], TO_ALL, 0, SUM, FLOAT32, 1
        )


def test_a_step_whose_object_is_gone_counts_as_given_up():
    two = Two()
    x, y = two.array(0, 1), two.array(1, 2)
    step = two.start(0, x)
    del step  # as an interrupt drops it before anybody has a reference
    x[:] = MINE
    late = two.start(1, y)
    assert late.drive(1)
    assert late.fault
    assert late.quitter == 0
    assert (x == MINE).all()
    assert (y == 2).all()


def test_giving_up_completes_a_step_to_which_all_have_come():
    two = Two()
    x, y = two.array(0, 1), two.array(1, 2)
    first, second = two.start(0, x), two.start(1, y)
    first.abandon()
    assert not first.fault
    assert second.drive(1)
    assert not second.fault
    assert second.quitter is None
    assert (x == 3).all()
    assert (y == 3).all()


def test_a_team_gives_up_what_is_not_over_and_nothing_else():
    two = Two()
    x, y = two.array(0, 1), two.array(1, 2)
    over = [two.start(0, x, SLOT), two.start(1, y, SLOT)]
    assert all(step.drive(1) for step in over)
    begun = two.start(0, x, SLOT + 1)
    two.teams[0].abandon()
    assert begun.drive(1)
    assert begun.quitter == 0
    again = two.start(1, y, SLOT + 1)
    assert again.drive(1)
    assert again.quitter == 0
    assert not any(step.fault for step in over)


def test_a_fork_gives_nothing_up():
    two = Two()
    x, y = two.array(0, 1), two.array(1, 2)
    step = two.start(0, x)
    child = os.fork()
    if child == 0:
        del step  # its memory of flags is its parent's
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    late = two.start(1, y)
    assert late.drive(1)
    assert step.drive(1)
    assert (x == 3).all()


def test_lanes_of_a_step_that_was_given_up_are_not_used_again():
    """Another rank may read them for as long as it likes."""
    two = Two()
    private = [np.full(3 << 20, r, np.uint8) for r in range(2)]
    starts = [
        _core.start_reduce(two.teams[r], SLOT, 42, x, x, [], TO_ALL, 0, SUM, 8, 1)
        for r, x in enumerate(private)
    ]
    starts[0].advance()  # its first segment is in a lane
    used = two.memories[0].usage()[0]
    assert used >= 1 << 20
    two.teams[0].abandon()
    starts[0].advance()
    assert starts[0].fault
    del starts
    z = [np.full(3 << 20, r, np.uint8) for r in range(2)]
    again = [
        _core.start_reduce(two.teams[r], SLOT + 1, 42, x, x, [], TO_ALL, 0, SUM, 8, 1)
        for r, x in enumerate(z)
    ]
    again[0].advance()
    again[1].advance()
    again[0].advance()
    assert two.memories[0].usage()[0] >= 2 * used


def test_a_lane_of_an_abandoned_step_is_free_once_its_team_is_retired():
    """Else each rank that an elastic job loses would take a MiB of shared memory with it."""
    two = Two()
    private = [np.full(3 << 20, r, np.uint8) for r in range(2)]
    starts = [
        _core.start_reduce(two.teams[r], SLOT, 42, x, x, [], TO_ALL, 0, SUM, 8, 1)
        for r, x in enumerate(private)
    ]
    starts[0].advance()
    two.teams[0].abandon()
    starts[0].advance()
    assert starts[0].fault
    assert two.memories[0].usage()[0] >= 1 << 20
    two.teams[0].retire()
    del starts
    two.teams.clear()
    assert two.memories[0].usage()[0] == 0


def test_a_lane_that_a_lost_rank_might_read_is_free_once_its_team_is_retired():
    two = Two()
    private = [np.full(3 << 20, r, np.uint8) for r in range(2)]
    first, second = (
        _core.start_reduce(two.teams[r], SLOT, 42, x, x, [], TO_ALL, 0, SUM, 8, 1)
        for r, x in enumerate(private)
    )
    while not first.is_over:
        first.advance()
        if not first.is_over:
            second.advance()
    assert not second.is_over  # and its rank dies
    del first
    team = two.teams[0]
    two.teams.clear()
    assert two.memories[0].usage()[0] >= 1 << 20
    team.retire()
    del team
    assert two.memories[0].usage()[0] == 0


@pytest.mark.parametrize("ends_by", ["its last reference", "being advanced"])
def test_a_step_of_a_retired_team_does_not_touch_the_windows_of_the_next(ends_by):
    """An error may hold the last reference to a step until the next view has begun."""
    two = Two()
    x, y = two.array(0, 1), two.array(1, 2)
    old = two.start(0, x)  # and the other rank dies
    old_teams = two.teams
    for rank in range(2):
        old_teams[rank].retire()
        two.memories[rank].clear_window(0)
    two.teams = [_core.make_team(r, 0, True, two.memories) for r in range(2)]
    if ends_by == "being advanced":
        old.advance()
        assert old.fault
    del old
    first, second = two.start(0, x), two.start(1, y)
    while not (first.is_over and second.is_over):
        first.advance()
        second.advance()
    assert not first.fault
    assert (x == 3).all()
