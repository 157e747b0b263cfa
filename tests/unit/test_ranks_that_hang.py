"""Ranks that do not come: who may have them killed, who gives up, and that nobody is left."""

from types import SimpleNamespace

import pytest
from harness import at_length
from hypothesis import given, settings
from hypothesis import strategies as st
from membership_model import Job, Training, steps

from ringcomm.config import Settings
from ringcomm.engine.api import begin_next_view
from ringcomm.errors import CommTimeoutError
from ringcomm.transport.membership.events_and_actions import Arrive, GiveUp, Heal, Heard
from ringcomm.transport.membership.messages import MembershipKind, MembershipMessage
from ringcomm.transport.membership.state_machine import Membership, Phase, handle
from ringcomm.transport.membership.view import Eviction, eviction

NOW, LATER, NEVER = Eviction


@pytest.mark.parametrize(
    ("missing", "members", "near", "expected"),
    [
        ({2}, (0, 1, 2), {0, 1, 2}, NOW),
        ({0, 1}, (0, 1, 2), {0, 1, 2}, NEVER),
        ({5, 7}, (1, 4, 5, 7), {1, 4, 5, 7}, NOW),
        ({5, 7}, (1, 4, 5, 7), {1, 4}, NOW),  # those on the other host do it, if any can
        ({1, 4}, (1, 4, 5, 7), {1, 4, 5, 7}, LATER),
        ({1, 4}, (1, 4, 5, 7), {4, 5, 7}, NEVER),  # 1 may live behind a link that is down
        ({0}, (0, 1), {0, 1}, LATER),
        ({0}, (7, 0), {0, 7}, NOW),  # process 7 is rank 0
        ({0}, (0, 1), {1}, NEVER),
        ({3}, (1,), {1, 3}, NOW),  # a spare
        ({0, 3}, (0, 1), {0, 1, 3}, LATER),
    ],
)
def test_who_may_have_those_killed_that_do_not_come(missing, members, near, expected):
    assert eviction(missing, members, near) is expected


def test_of_two_parts_that_wait_for_each_other_one_may_kill_at_once():
    for n in range(2, 7):
        for bits in range(1, 2**n - 1):
            part = {rank for rank in range(n) if bits >> rank & 1}
            rest = set(range(n)) - part
            near = set(range(n))
            both = sorted(eviction(other, range(n), near) for other in (part, rest))
            assert both[0] is NOW
            assert both[1] is not NOW


def test_who_gives_up_ends_the_job_also_for_those_without_a_place_and_for_those_that_wake_up():
    job = Job(4, 2)
    for spare in (2, 3):
        job.handle(spare, Arrive())
    job.hangs.add(0)
    job.handle(1, GiveUp())
    job.queues[1, 3].clear()  # rank 1 ends before all have heard of it
    job.dead.add(1)
    job.rest()
    assert [job.states[rank].phase for rank in (2, 3)] == [Phase.GONE] * 2
    job.hangs.clear()
    job.rest()
    assert job.states[0].phase is Phase.GONE


class Clock:
    """A membership for which time passes; handle() is told of who is to be killed."""

    def __init__(self, monkeypatch):
        self.now, self.killed, self.has_given_up = 0.0, [], False
        self.state = Membership.first(0, 4)
        monkeypatch.setattr(begin_next_view.time, "monotonic", lambda: self.now)
        limits = Settings(elastic=True, elastic_hang_s=5.0, stall_warning_s=0.0, grace_s=3.0)
        self.patience = begin_next_view._HealingWait(world_of(self.state.view), limits)

    def wait(self, seconds, missing):
        self.now += seconds
        stopped = frozenset({1, 2, 3}) - missing
        self.state = Membership.first(0, 4)
        self.state, _ = handle(self.state, Heal())
        for other in stopped:
            message = MembershipMessage(
                MembershipKind.STOPPED, self.state.view, 0, self.state.changes
            )
            self.state, _ = handle(self.state, Heard(other, message))
        assert set(self.state.missing) == missing
        self.patience.check(self)

    def handle(self, event):
        if event == GiveUp():
            self.has_given_up = True
        else:
            self.killed.append(event.processes)


def world_of(view):
    """Return what begin_next_view._HealingWait needs of a world."""
    presence = SimpleNamespace(near=frozenset(view.members))
    return SimpleNamespace(transport=SimpleNamespace(view=view), presence=presence)


def test_who_heals_waits_anew_for_those_that_are_left_when_another_has_come(monkeypatch):
    clock = Clock(monkeypatch)
    clock.wait(0.0, {1, 2})
    clock.wait(4.0, {2})  # 1 has come
    clock.wait(4.0, {2})
    assert clock.killed == []
    clock.wait(1.5, {2})
    assert clock.killed == [{2}]


def test_a_rank_that_heals_does_not_have_most_of_the_others_killed(monkeypatch):
    clock = Clock(monkeypatch)
    clock.wait(0.0, {1, 2, 3})
    monkeypatch.setattr(begin_next_view, "_text_of_wait", lambda *_: "waits")
    with pytest.raises(CommTimeoutError, match="waits"):
        clock.wait(6.0, {1, 2, 3})
    assert clock.killed == []
    assert clock.has_given_up


@pytest.mark.long
@settings(max_examples=at_length(3_000, 40), deadline=None)
@given(st.integers(1, 5), st.integers(0, 3), st.booleans(), st.data())
def test_if_so_many_hang_that_a_rank_gives_up_nobody_goes_on_or_waits(
    n_members, n_spares, is_on_hosts, data
):
    hosts = [rank % 2 for rank in range(n_members + n_spares)] if is_on_hosts else None
    job = Training(n_members, n_spares, 12, 2, hosts)
    steps(job, data, most=12, any_may_hang=True)
    job.finish()
    well = {rank: job.states[rank] for rank in job.live() if rank not in job.hangs}
    ended = {rank for rank, state in well.items() if state.phase is Phase.GONE}
    assert not ended or ended == well.keys(), well
    if ended:
        return
    assert len({state.view for state in well.values() if state.is_member}) <= 1, "one part"
    for rank, state in well.items():
        if state.is_member:
            assert job.over[rank] == 1, state
        else:  # without a place: nobody has the state, or all that have it hang
            waits_in_vain = state.is_orphaned or job.hangs.issuperset(state.colleagues)
            assert state.run or waits_in_vain, (state, job.hangs, job.dead)
