"""The agreement on who is in the job, under any order of deaths, messages and departures."""

import threading
from types import SimpleNamespace

import pytest
from harness import at_length
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_model import Job, Training, steps

from ringcomm.engine.api import spares_and_reserves
from ringcomm.errors import ConfigError
from ringcomm.status.page_enums import PageState
from ringcomm.transport.membership.events_and_actions import (
    Arrive,
    EvictRanks,
    Finish,
    Heal,
    Heard,
    KillHere,
    Leave,
    Lost,
    Resize,
    Withdraw,
)
from ringcomm.transport.membership.messages import MembershipKind, MembershipMessage
from ringcomm.transport.membership.state_machine import Membership, Phase, handle
from ringcomm.transport.membership.view import Changes, View
from ringcomm.transport.presence import Presence


@pytest.mark.long
@settings(max_examples=at_length(3_000, 30), deadline=None)
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


@pytest.mark.long
@settings(max_examples=at_length(3_000, 30), deadline=None)
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
        goes_on_elsewhere = state.run or state.colleagues or state.is_job_over
        assert state.is_member or state.is_orphaned or goes_on_elsewhere
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
    job.rest()
    view = View(1, (0, 2))
    assert [job.states[r].view for r in (0, 2)] == [view, view]
    assert [view.rank_of(m) for m in (0, 1, 2)] == [0, None, 1]


def test_a_rank_that_heals_without_a_loss_waits():
    job = Job(2)
    for rank in (0, 1):
        job.handle(rank, Heal())
    job.rest()
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
    job.rest()
    assert job.over[:2] == [1, 1]
    assert job.states[1].view == View.first(3)


def test_what_a_lost_rank_has_sent_does_not_count_once_others_rely_on_its_loss():
    job = Job(3)
    for rank in range(3):
        job.handle(rank, Finish())
    for source, dest in ((0, 2), (1, 2), (1, 0)):  # for rank 2 the run is over, as it says
        job.deliver(source, dest)
    job.dead.add(2)
    job.queues[2, 1].clear()
    job.see(0, 2)
    job.handle(0, Heal())
    while job.queues[2, 0]:
        job.deliver(2, 0)
    assert job.states[0].phase is Phase.HEALING
    job.finish()
    assert job.over[:2] == [1, 1]
    assert {job.states[rank].view.members for rank in (0, 1)} == {(0, 1)}


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


@pytest.mark.parametrize("kind", MembershipKind)
def test_messages_are_read_as_they_were_written(kind):
    view = View(3, (4, 0, 9))
    changes = Changes(frozenset({7, 2}), frozenset({9}), frozenset({(2, 5), (1, 3)}))
    message = MembershipMessage(kind, view, 1, changes)
    assert MembershipMessage.of(message.numbers()) == message


def test_a_spare_takes_the_rank_of_a_lost_member():
    job = Job(5, 2)
    for spare in (4, 3):
        job.handle(spare, Arrive())
    job.dead.add(1)
    job.rest()
    view = View(3, (0, 3, 2))
    assert {job.states[r].view for r in job.live()} == {view}
    assert [job.states[r].phase for r in (0, 2, 3, 4)] == [Phase.WORKING] * 3 + [Phase.HEALING]
    job.finish()
    assert [job.over[r] for r in job.live()] == [1] * 4, "a spare hears of the end, too"
    assert not job.states[4].is_job_over
    for rank in (0, 2, 3):
        job.handle(rank, Leave())
    job.rest()
    assert job.states[4].is_job_over


def test_a_spare_that_has_not_arrived_is_not_waited_for_and_joins_later():
    job = Job(3, 1)
    job.dead.add(1)
    job.rest()
    assert job.states[0].view.members == (0,)
    assert not job.states[0].wants_another_size
    job.handle(2, Arrive())
    job.rest()
    assert job.states[0].wants_another_size, "and nobody stops for it before a rank decides to"
    assert job.states[0].phase is Phase.WORKING
    job.handle(0, Heal())
    job.rest()
    assert {job.states[r].view for r in (0, 2)} == {View(2, (0, 2))}


def test_a_spare_with_a_place_that_hears_of_another_loss_first_still_learns_that_it_has_one():
    job = Job(4, 2)
    for spare in (2, 3):
        job.handle(spare, Arrive())
    job.dead.add(1)
    job.rest(until=lambda: all(job.to_clear[r] for r in (0, 2, 3)))
    for rank in (3, 2, 0):
        job.clear(rank)
    for source in (2, 3):
        while job.queues[source, 0]:
            job.deliver(source, 0)
    assert job.states[0].view.members == (0, 2)
    job.dead.add(3)  # which is no member of the new view
    job.see(2, 3)  # before rank 0 says that it was ready
    job.rest()
    assert job.states[2].view == job.states[0].view
    assert job.states[2].phase is Phase.WORKING


@pytest.mark.parametrize("n_members", [1, 3])
def test_ranks_that_have_stopped_for_a_spare_go_on_although_it_is_lost(n_members):
    job = Job(n_members + 1, 1)
    job.handle(0, Resize(n_members + 1))
    job.handle(n_members, Arrive())
    job.rest()
    assert all(state.wants_another_size for state in job.states)
    job.dead.add(n_members)
    job.handle(0, Heal())
    job.rest()
    members = tuple(range(n_members))
    assert {job.states[r].view for r in members} == {View(3, members)}
    job.finish()
    assert [job.over[r] for r in members] == [1] * n_members


def test_half_of_a_job_that_hangs_ends_it():
    job = Training(4, 2, 1, 1)
    job.handle(4, Arrive())
    job.hangs |= {0, 1}
    job.dead.add(2)
    job.finish()
    assert {job.states[rank].phase for rank in (3, 4, 5)} == {Phase.GONE}


def test_spares_alone_do_not_go_on_without_the_state():
    job = Job(4, 2)
    for spare in (2, 3):
        job.handle(spare, Arrive())
    job.rest()
    job.dead |= {0, 1}
    job.rest()
    assert all(job.states[spare].is_orphaned for spare in (2, 3))
    assert all(not job.states[spare].is_member for spare in (2, 3))


def test_who_has_heard_of_a_later_change_still_learns_of_the_view_that_others_have_installed():
    job = Job(5, 2)
    for spare in (3, 4):
        job.handle(spare, Arrive())
    job.rest()
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
    job.rest()
    assert job.states[1].phase is Phase.WORKING
    assert job.states[1].view == job.states[0].view


def test_who_hears_of_a_view_from_one_without_a_place_first_goes_over_to_it_with_its_members():
    job = Job(5)
    job.handle(0, Resize(3))
    job.handle(0, Heal())
    while not all(job.to_clear):
        moves = [m for m in job.moves() if m[0] != job.clear]
        moves[0][0](*moves[0][1:])
    for rank in (1, 2, 3, 4, 0):
        job.clear(rank)
    for rank in (1, 2, 4):  # they know the view, 0 has yet to hear that 3 is ready
        for source in job.live():
            while job.queues[source, rank]:
                job.deliver(source, rank)
    assert [s.phase for s in job.states[:3]] == [Phase.HEALING, Phase.WORKING, Phase.WORKING]
    job.queues[3, 0].clear()
    job.dead.add(3)  # which is no member of the new view
    job.see(0, 3)
    job.deliver(0, 4)
    while job.queues[4, 0]:  # before 1 and 2 answer that they have agreed
        job.deliver(4, 0)
    job.rest()
    assert [s.phase for s in job.states[:3]] == [Phase.WORKING] * 3
    assert {s.view.members for s in job.states[:3]} == {(0, 1, 2)}
    assert len({s.view for s in job.states[:3]}) == 1


def test_who_had_stopped_in_the_last_view_and_works_in_this_one_has_not_stopped_in_it():
    job = Job(5)
    job.dead.add(4)
    while not all(job.to_clear[:4]):
        moves = [m for m in job.moves() if m[0] != job.clear]
        moves[0][0](*moves[0][1:])
    for rank in range(4):
        job.clear(rank)
    for rank in (0, 2, 3):  # they work in the next view, 1 has yet to hear that they may
        for source in (0, 1, 2, 3):
            while job.queues[source, rank]:
                job.deliver(source, rank)
    assert [s.phase for s in job.states[:3]] == [Phase.WORKING, Phase.HEALING, Phase.WORKING]
    job.dead.add(3)
    job.queues[3, 1].clear()
    job.see(1, 3)  # and it stops for this, in the last view
    job.deliver(1, 0)
    while job.queues[0, 1]:  # the last of them says that the others have agreed
        job.deliver(0, 1)
    assert job.states[1].view.number == job.states[0].view.number == 1
    assert job.states[1].phase is Phase.WORKING
    for rank in (0, 2):
        job.handle(rank, Heal())
    job.finish()  # nobody clears memory in which another works
    assert {job.states[rank].view.members for rank in (0, 1, 2)} == {(0, 1, 2)}


def test_ranks_on_the_host_of_one_that_hangs_are_asked_to_kill_it():
    job = Job(3)
    _, actions = handle(job.states[0], EvictRanks(frozenset({2})))
    kill, send = actions
    assert kill == KillHere(frozenset({2}))
    assert send.to == (1, 2)
    assert handle(job.states[1], Heard(0, send.message))[1] == [KillHere(frozenset({2}))]


def test_a_member_that_is_too_many_leaves_the_view_and_comes_back():
    job = Job(3)
    job.handle(1, Resize(2))
    job.rest()
    assert all(job.states[r].wants_another_size for r in range(3))
    job.handle(0, Heal())
    job.rest()
    assert {job.states[r].view for r in range(3)} == {View(1, (0, 1))}
    assert job.states[2].phase is Phase.HEALING
    job.handle(0, Resize(3))
    job.rest()
    job.handle(0, Heal())
    job.rest()
    assert {job.states[r].view for r in range(3)} == {View(2, (0, 1, 2))}
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


@settings(max_examples=at_length(3_000, 12), deadline=None)
@given(st.integers(2, 5), st.integers(0, 2), st.integers(1, 30), st.integers(1, 3), st.data())
def test_each_sample_is_in_the_state_of_all_once_whoever_dies_hangs_or_joins(
    n_members, n_spares, n_samples, batch_size, data
):
    job = Training(n_members, n_spares, n_samples, batch_size)
    steps(job, data, most=24)
    job.finish()
    live = [rank for rank in job.live() if rank not in job.hangs]
    members = [rank for rank in live if job.states[rank].is_member]
    if job.has_given_up:  # ranks have died since others began to hang, which are too many then
        assert {job.states[rank].phase for rank in live} == {Phase.GONE}
        return
    if not members:
        waiting = [job.states[rank] for rank in live if not job.states[rank].run]
        assert all(s.is_orphaned or job.hangs & set(s.colleagues) for s in waiting), (
            waiting,
            job.hangs,
            job.dead,
        )
        return
    assert {job.over[rank] for rank in members} == {1}, [job.states[rank] for rank in live]
    states = {job.commits[rank].samples for rank in members}
    assert [sorted(each) for each in states] == [list(range(n_samples))]


def test_who_is_out_of_the_next_view_and_hears_of_another_loss_first_still_learns_that_it_is_out():
    job = Job(3)
    job.handle(0, Resize(1))
    for rank in (0, 1, 2):
        job.handle(rank, Heal())
    job.rest(until=lambda: all(job.to_clear))
    for rank in (0, 1, 2):
        job.clear(rank)
    for source in (1, 2):
        while job.queues[source, 0]:
            job.deliver(source, 0)
    assert job.states[0].view.members == (0,)
    job.queues[2, 1].clear()  # rank 1 never hears that rank 2 was ready
    job.dead.add(2)
    job.rest()
    assert job.states[1].view == job.states[0].view
    job.finish()
    assert job.over == [1, 1, 0]
    assert (job.states[1].run, job.states[1].is_member) == (1, False)


def test_who_comes_back_has_the_state_of_those_that_stayed_though_it_had_a_step_that_they_lost():
    job = Training(3, 0, 30, 1)
    job.handle(1, Resize(1))
    while job.queues[1, 0] or job.queues[1, 2]:
        for dest in (0, 2):
            if job.queues[1, dest]:
                job.deliver(1, dest)
    for _ in range(2):  # the state, and a step
        for rank in range(3):
            job.begin(rank)
        for rank in range(3) if job.at[2][1] == 0 else [2]:
            job.end(rank)
    job.dead.add(1)  # and rank 0 does not get the result of the step
    for rank in (0, 2):
        job.see(rank, 1)
        job.handle(rank, Heal())
    job.rest(until=lambda: job.states[0].view.members == (0,))
    for _ in range(2):
        job.begin(0)
        job.end(0)
    assert job.commits[0].n == 1
    job.handle(0, Resize(2))
    job.handle(0, Heal())
    job.finish()
    assert [sorted(job.commits[rank].samples) for rank in (0, 2)] == [list(range(30))] * 2


def test_spares_that_do_not_know_each_other_do_not_go_on_when_all_others_have_left_and_ended():
    job = Job(4, 2)
    for spare in (2, 3):
        job.handle(spare, Arrive())
        job.rest()
    for rank in (0, 1):
        job.handle(rank, Leave())
    job.is_leaving |= {0, 1}
    job.rest()
    job.dead |= {0, 1}
    job.rest()
    assert not any(job.states[spare].is_member for spare in (2, 3))
    assert all(job.states[spare].is_job_over for spare in (2, 3))


def test_a_request_for_the_size_that_is_wanted_already_is_no_change(monkeypatch):
    """All ranks may ask, and ask again after a loss has taken them back, when no change is left."""
    job = Job(3)
    job.handle(0, Resize(2))
    membership = SimpleNamespace(state=job.states[0], handle=pytest.fail)
    presence = SimpleNamespace(size=3, lines=range(2), n_losses=1)
    extensions = SimpleNamespace(require_view=lambda _: None)
    engine = SimpleNamespace(settings=SimpleNamespace(elastic_min=1), extensions=extensions)
    world = SimpleNamespace(membership=membership, presence=presence, engine=engine)
    monkeypatch.setattr(spares_and_reserves, "current", lambda: world)
    spares_and_reserves.request_size(2)
    with pytest.raises(ConfigError, match="resized 1 times, and init\\(\\) was prepared for 1"):
        spares_and_reserves.request_size(3)


class _Service:
    """The membership of process 0 of 3, which the others told something before they ended."""

    def __init__(self, *told):
        self.state, self._told = Membership.first(0, 3, 1), list(told)
        self.gone_on, self.to_kill = [], set()

    def handle(self, event):
        self.state, _ = handle(self.state, event)

    def poll(self):
        while self._told:
            self.handle(self._told.pop(0))


class _Left(dict):
    """Neighbours that have ended, with pages that say LEFT."""

    def __init__(self, *numbers):
        page = SimpleNamespace(snapshot=lambda: {"state": PageState.LEFT})
        super().__init__({number: SimpleNamespace(page=page) for number in numbers})

    def ended(self):
        return list(self)

    def unwatch(self, number):
        pass


def test_who_said_that_it_takes_part_no_more_is_lost_also_if_its_end_is_seen_first():
    presence = object.__new__(Presence)  # which needs no MPI to look
    presence._neighbours, presence.deaths, presence._ended = _Left(1, 2), [], set()
    presence._look_at, presence._lock, presence.is_fault_tolerant = 0.0, threading.Lock(), False
    gone = Heard(2, MembershipMessage(MembershipKind.GONE, View.first(2), 0, Changes()))
    presence.membership = _Service(gone)
    assert presence.look(at_once=True)
    assert [died.rank for died in presence.deaths] == [2]  # 1 has left in order
