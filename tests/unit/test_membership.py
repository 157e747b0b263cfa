"""The agreement on who is in the job, under any order of deaths, messages and departures."""

from collections import defaultdict, deque

import pytest
from harness import at_length
from hypothesis import given, settings
from hypothesis import strategies as st

from ringcomm.transport.membership.events import (
    Arrive,
    Clear,
    Cleared,
    EndRun,
    Evict,
    Finish,
    GoneOn,
    Heal,
    Heard,
    Install,
    KillHere,
    Leave,
    Lost,
    Resize,
    Send,
    Withdraw,
)
from ringcomm.transport.membership.machine import Membership, Phase, handle
from ringcomm.transport.membership.messages import Kind, Message
from ringcomm.transport.membership.view import Changes, View


class Job:
    """Processes that are machines, and messages between them: in order per pair, at any speed.

    The last n_spares of them begin outside.
    """

    def __init__(self, size, n_spares=0):
        self.size = size
        n_members = size - n_spares
        self.states = [Membership.first(me, size, n_spares) for me in range(size)]
        self.dead = set()
        self.seen = defaultdict(set)  # deaths that a rank has seen
        self.queues = defaultdict(deque)  # (source, dest) -> messages
        self.to_clear = [None] * size  # set for which a rank has yet to clear its memory
        self.has_cleared = [None] * size
        self.views = [[View.first(n_members)] for _ in range(size)]
        self.over = [0] * size
        self.went_on = defaultdict(list)
        self.is_leaving = set()
        self.is_working = set(range(n_members))  # in the last view of each

    def live(self):
        return [r for r in range(self.size) if r not in self.dead]

    def handle(self, rank, event, most_sends=None):
        """Let a rank handle an event; it dies after most_sends messages if that is not None."""
        before = self.states[rank].changes
        self.states[rank], actions = handle(self.states[rank], event)
        after = self.states[rank].changes
        assert before.lost <= after.lost
        assert before.arrived <= after.arrived
        if isinstance(event, Heal) or self.states[rank].phase is Phase.GONE:
            self.is_working.discard(rank)
        for action in actions:
            match action:
                case Send(to, message):
                    for dest in to:
                        assert dest != rank
                        if most_sends == 0:
                            self.dead.add(rank)
                            return
                        most_sends = None if most_sends is None else most_sends - 1
                        self.queues[rank, dest].append(Message.of(message.numbers()))
                case Clear():
                    self.to_clear[rank] = self.states[rank].changes
                case Install(view):
                    self.install(rank, view)
                case EndRun():
                    self.over[rank] += 1
                    if self.states[rank].is_member:
                        self.is_working.add(rank)
                case GoneOn(other):
                    assert rank in self.is_leaving
                    self.went_on[rank].append(other)
        if most_sends is not None:
            self.dead.add(rank)

    def install(self, rank, view):
        before = self.views[rank][-1]
        assert view.number > before.number
        assert rank in view.members
        assert rank not in self.is_working
        assert view.members[0] in before.members or len(self.views[view.members[0]]) > 1
        self.views[rank].append(view)
        self.is_working.add(rank)
        # All others have stopped and cleared their memory, so nobody works in an older view.
        for other in view.members:
            if other not in self.dead:
                assert other not in self.is_working or self.views[other][-1] == view
        for views in self.views:
            for other in views:
                assert (other.number == view.number) == (other == view)
        first = set(self.views[0][0].members)
        gone = first - set(view.members) - self.dead - self.is_leaving
        assert not gone or self.states[rank].changes.requests, "a member that lives stays"

    def deliver(self, source, dest):
        message = self.queues[source, dest].popleft()
        if dest not in self.dead:
            self.handle(dest, Heard(source, message))

    def see(self, rank, dead):
        self.seen[rank].add(dead)
        self.handle(rank, Lost(frozenset({dead})))

    def clear(self, rank):
        for other in self.states[rank].others:  # nobody works on this memory
            assert other in self.dead or other not in self.is_working, (rank, other)
        self.has_cleared[rank], self.to_clear[rank] = self.to_clear[rank], None
        self.handle(rank, Cleared())

    def moves(self):
        """Return what can happen next without the will of a user."""
        can = [(self.deliver, *pair) for pair, queue in self.queues.items() if queue]
        for rank in self.live():
            can += [(self.see, rank, d) for d in sorted(self.dead - self.seen[rank])]
            if self.to_clear[rank] is not None and self.states[rank].phase is Phase.HEALING:
                can.append((self.clear, rank))
            state = self.states[rank]
            is_at_work = state.phase is Phase.WORKING and not self.over[rank]
            sees_a_reason = state.has_new_loss or (state.wants_another_size and state.stopped)
            is_needed = (is_at_work and sees_a_reason) or state.must_heal
            if is_needed and rank not in self.is_leaving:
                can.append((self.handle, rank, Heal()))
        return can

    def finish(self):
        """Let everything happen that can happen, and each rank that works finish its run."""
        for _ in range(10_000):
            if moves := self.moves():
                call, *arguments = moves[0]
                call(*arguments)
                continue
            todo = [r for r in self.live() if self.can_finish(r)]
            if not todo:
                return
            for rank in todo:
                self.handle(rank, Finish())
        raise AssertionError("the job never comes to rest")

    def can_heal(self, rank):
        state = self.states[rank]
        grows = state.wants_another_size and rank == state.view.members[0]
        return self.can_finish(rank) and (state.has_new_loss or grows)

    def can_finish(self, rank):
        at_work = self.states[rank].phase is Phase.WORKING and not self.over[rank]
        return at_work and rank not in self.is_leaving


def steps(job, data):
    """Do a few things that a user or a fault does, and things that follow, in any order."""
    for _ in range(data.draw(st.integers(0, 90))):
        live = job.live()
        chosen = data.draw(st.integers(0, 9))
        rank = live[data.draw(st.integers(0, len(live) - 1))]
        moves = job.moves()
        if chosen == 0 and len(live) > 1:
            job.dead.add(rank)
        elif chosen == 1 and job.can_finish(rank):
            n = data.draw(st.none() | st.integers(0, job.size)) if len(live) > 1 else None
            job.handle(rank, Finish(), n)
        elif chosen == 2 and len(live) > 1 and job.can_heal(rank):
            job.handle(rank, Heal(), data.draw(st.none() | st.integers(0, job.size)))
        elif chosen == 4 and job.can_finish(rank) and data.draw(st.booleans()):
            job.handle(rank, Resize(data.draw(st.integers(1, job.size))))
        elif chosen == 3 and job.states[rank].phase is Phase.OUTSIDE:
            n = data.draw(st.none() | st.integers(0, job.size)) if len(live) > 1 else None
            job.handle(rank, Arrive(), n)
        elif moves:
            call, *arguments = moves[data.draw(st.integers(0, len(moves) - 1))]
            call(*arguments)


@settings(max_examples=at_length(3_000, 150), deadline=None)
@given(st.integers(2, 6), st.integers(0, 3), st.data())
def test_after_any_changes_the_members_that_live_are_in_one_view_and_finish_together(
    n_members, n_spares, data
):
    job = Job(n_members + n_spares, n_spares)
    steps(job, data)
    job.finish()
    live = job.live()
    is_lost = not any(job.states[r].is_member for r in live)
    if is_lost:
        assert n_spares or any(job.states[r].changes.requests for r in live)
        assert all(job.states[r].is_orphaned for r in live if not job.states[r].run)
        return
    assert {job.states[r].run for r in live} == {1}, [job.states[r] for r in live]
    ends = {job.states[r].view for r in live if job.states[r].is_member}
    assert len(ends) == 1, "the run is over in one view"
    view = ends.pop()
    if not any(job.states[r].changes.requests for r in live):
        assert set(live) & set(range(n_members)) <= set(view.members)
        assert view.size <= n_members


@settings(max_examples=at_length(3_000, 150), deadline=None)
@given(st.integers(2, 6), st.data())
def test_ranks_that_leave_or_give_up_keep_nobody_waiting(size, data):
    job = Job(size)
    for _ in range(data.draw(st.integers(1, size - 1))):
        steps(job, data)
        stays = [r for r in job.live() if r not in job.is_leaving and not job.over[r]]
        if len(stays) > 1:
            rank = stays[data.draw(st.integers(0, len(stays) - 1))]
            job.is_leaving.add(rank)
            gives_up = data.draw(st.booleans()) or job.states[rank].phase is not Phase.WORKING
            job.handle(rank, Withdraw() if gives_up else Leave())
    for rank in job.live():  # the others need it, and get an error
        state = job.states[rank]
        if job.can_finish(rank) and job.is_leaving.intersection(state.view.members):
            job.handle(rank, Heal())
    job.finish()
    stay = [r for r in job.live() if r not in job.is_leaving]
    for rank in stay:  # a request may have put it out of the view
        state = job.states[rank]
        assert state.is_member or state.changes.requests
        assert state.is_member or state.is_orphaned or state.run or state.colleagues
    at_work = [r for r in stay if job.states[r].is_member]
    assert {job.over[r] for r in at_work} <= {1}, (at_work, job.dead, job.is_leaving, job.states)
    assert len({job.states[r].view for r in at_work if job.over[r]}) <= 1
    for rank in at_work:  # none waits for one that has left
        assert job.over[rank], job.states[rank]


def test_one_death_is_a_view_of_the_others():
    job = Job(3)
    job.dead.add(1)
    for rank in (0, 2):
        job.see(rank, 1)
        job.handle(rank, Heal())
    while moves := job.moves():
        moves[0][0](*moves[0][1:])
    view = View(1, (0, 2), (0, 0))
    assert [job.states[r].view for r in (0, 2)] == [view, view]
    assert [view.rank_of(m) for m in (0, 1, 2)] == [0, None, 1]


def test_a_rank_that_heals_without_a_loss_waits():
    job = Job(2)
    for rank in (0, 1):
        job.handle(rank, Heal())
    while moves := job.moves():
        moves[0][0](*moves[0][1:])
    assert [s.phase for s in job.states] == [Phase.HEALING] * 2


def test_who_hears_that_the_run_is_over_does_not_heal_although_a_member_has_died():
    job = Job(3)
    for rank in range(3):
        job.handle(rank, Finish())
    job.deliver(1, 0)
    job.deliver(2, 0)  # for rank 0 the run is over
    job.dead.add(2)
    job.queues[2, 1].clear()  # and rank 1 never hears that rank 2 was done
    job.see(1, 2)
    assert job.states[1].must_heal
    job.handle(1, Heal())
    while moves := job.moves():
        moves[0][0](*moves[0][1:])
    assert job.over[:2] == [1, 1]
    assert job.states[1].view == View.first(3)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_leaves_tells_those_that_heal_and_learns_that_they_go_on(when):
    job = Job(3)
    job.is_leaving.add(0)
    if when == "before":
        job.handle(0, Leave())
    job.dead.add(2)
    job.see(1, 2)
    job.handle(1, Heal())
    if when == "after":
        job.deliver(1, 0)
        job.handle(0, Leave())
    job.finish()
    assert job.went_on[0] == [1]
    assert job.states[1].view.members == (1,)


@pytest.mark.parametrize("kind", Kind)
def test_messages_are_read_as_they_were_written(kind):
    view = View(3, (4, 0, 9), (0, 2, 1))
    changes = Changes(frozenset({7, 2}), frozenset({9}), frozenset({(2, 5), (1, 3)}))
    message = Message(kind, view, 1, changes)
    assert Message.of(message.numbers()) == message


def rest(job):
    """Let everything happen that can happen by itself."""
    while moves := job.moves():
        moves[0][0](*moves[0][1:])


def test_a_spare_takes_the_rank_of_a_lost_member():
    job = Job(5, 2)
    for spare in (4, 3):
        job.handle(spare, Arrive())
    job.dead.add(1)
    rest(job)
    view = View(3, (0, 3, 2), (0, 0, 0))
    assert {job.states[r].view for r in job.live()} == {view}
    assert [job.states[r].phase for r in (0, 2, 3, 4)] == [Phase.WORKING] * 3 + [Phase.HEALING]
    job.finish()
    assert [job.over[r] for r in job.live()] == [1] * 4, "a spare hears of the end, too"
    assert not job.states[4].is_job_over
    for rank in (0, 2, 3):
        job.handle(rank, Leave())
    rest(job)
    assert job.states[4].is_job_over


def test_a_spare_that_has_not_arrived_is_not_waited_for_and_joins_later():
    job = Job(3, 1)
    job.dead.add(1)
    rest(job)
    assert job.states[0].view.members == (0,)
    assert not job.states[0].wants_another_size
    job.handle(2, Arrive())
    rest(job)
    assert job.states[0].wants_another_size, "and nobody stops for it before a rank decides to"
    assert job.states[0].phase is Phase.WORKING
    job.handle(0, Heal())
    rest(job)
    assert {job.states[r].view for r in (0, 2)} == {View(2, (0, 2), (0, 0))}


def test_spares_alone_do_not_go_on_without_the_state():
    job = Job(4, 2)
    for spare in (2, 3):
        job.handle(spare, Arrive())
    rest(job)
    job.dead |= {0, 1}
    rest(job)
    assert all(job.states[spare].is_orphaned for spare in (2, 3))
    assert all(not job.states[spare].is_member for spare in (2, 3))


def test_who_has_heard_of_a_later_change_still_learns_of_the_view_that_others_have_installed():
    job = Job(5, 2)
    for spare in (3, 4):
        job.handle(spare, Arrive())
    rest(job)
    job.dead.add(2)
    while not all(job.to_clear[r] for r in (0, 1, 3, 4)):
        moves = [m for m in job.moves() if m[0] != job.clear]
        moves[0][0](*moves[0][1:])
    for rank in (1, 3, 4):
        job.clear(rank)
    job.clear(0)
    for source in (1, 3, 4):  # rank 0 installs the view, 1 has yet to hear that 4 is ready
        while job.queues[source, 0]:
            job.deliver(source, 0)
    assert job.states[0].phase is Phase.WORKING
    assert job.states[1].phase is Phase.HEALING
    job.queues[4, 1].clear()
    job.dead.add(4)  # which is no member of the new view
    rest(job)
    assert job.states[1].phase is Phase.WORKING
    assert job.states[1].view == job.states[0].view


def test_ranks_on_the_host_of_one_that_hangs_are_asked_to_kill_it():
    job = Job(3)
    _, actions = handle(job.states[0], Evict(frozenset({2})))
    kill, send = actions
    assert kill == KillHere(frozenset({2}))
    assert send.to == (1, 2)
    assert handle(job.states[1], Heard(0, send.message))[1] == [KillHere(frozenset({2}))]


def test_a_member_that_is_too_many_leaves_the_view_and_comes_back():
    job = Job(3)
    job.handle(1, Resize(2))
    rest(job)
    assert all(job.states[r].wants_another_size for r in range(3))
    job.handle(0, Heal())
    rest(job)
    assert {job.states[r].view for r in range(3)} == {View(1, (0, 1), (0, 0))}
    assert job.states[2].phase is Phase.HEALING
    job.handle(0, Resize(3))
    rest(job)
    job.handle(0, Heal())
    rest(job)
    assert {job.states[r].view for r in range(3)} == {View(2, (0, 1, 2), (0, 0, 0))}
    job.finish()
    assert job.over == [1, 1, 1]


def test_a_reserve_is_needed_when_too_few_processes_before_it_live():
    state = Membership.first(4, 6, 1, 2)  # members 0 to 2, spare 3, reserves 4 and 5
    assert not state.is_needed
    state, _ = handle(state, Lost(frozenset({3})))
    assert state.is_needed
    other, _ = handle(Membership.first(5, 6, 1, 2), Lost(frozenset({3})))
    assert not other.is_needed
    other, _ = handle(other, Resize(4))
    assert other.is_needed
