"""Processes that agree on the members of their job, under any order of messages and faults."""

from collections import defaultdict, deque
from dataclasses import dataclass

from hypothesis import strategies as st

from ringcomm.data import ShardedSampler
from ringcomm.transport.membership import events_and_actions as ea
from ringcomm.transport.membership.messages import MembershipMessage
from ringcomm.transport.membership.state_machine import Membership, Phase, handle
from ringcomm.transport.membership.view import Eviction, View, eviction


class Job:
    """Processes that are machines, and messages between them: in order per pair, at any speed.

    The last n_spares of them begin outside. hosts: the host of each; only there it can be killed.
    """

    def __init__(self, size, n_spares=0, hosts=None):
        self.size = size
        self.hosts = hosts or [0] * size
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
        self.hangs = set()  # those that do nothing, until they are killed
        self.to_kill = set()
        self.evicted = set()  # (who waits, for whom): told to kill them
        self.has_given_up = False  # a rank, as at least half of its view hangs

    def live(self):
        return [r for r in range(self.size) if r not in self.dead]

    def handle(self, rank, event, most_sends=None):
        """Let a rank handle an event; it dies after most_sends messages if that is not None."""
        before = self.states[rank].changes
        self.states[rank], actions = handle(self.states[rank], event)
        after = self.states[rank].changes
        assert before.lost <= after.lost
        assert before.arrived <= after.arrived
        if isinstance(event, ea.Heal) or self.states[rank].phase is Phase.GONE:
            self.is_working.discard(rank)
        for action in actions:
            match action:
                case ea.SendMessage(to, message):
                    for dest in to:
                        assert dest != rank
                        if most_sends == 0:
                            self.dead.add(rank)
                            return
                        most_sends = None if most_sends is None else most_sends - 1
                        self.queues[rank, dest].append(MembershipMessage.of(message.numbers()))
                case ea.Clear():
                    self.to_clear[rank] = self.states[rank].changes
                case ea.Install(view):
                    self.install(rank, view)
                case ea.EndRun():
                    self.over[rank] += 1
                    if self.states[rank].is_member:
                        self.is_working.add(rank)
                case ea.GoneOn(other):
                    assert rank in self.is_leaving
                    self.went_on[rank].append(other)
                case ea.KillHere(processes):
                    assert processes <= self.hangs | self.dead, "only those that hang are killed"
                    self.to_kill |= processes & self.near(rank)
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
            self.handle(dest, ea.Heard(source, message))

    def see(self, rank, dead):
        self.seen[rank].add(dead)
        self.handle(rank, ea.Lost(frozenset({dead})))

    def clear(self, rank):
        for other in self.states[rank].others:  # nobody works on this memory
            assert other in self.dead or other not in self.is_working, (rank, other)
        self.has_cleared[rank], self.to_clear[rank] = self.to_clear[rank], None
        self.handle(rank, ea.Cleared())

    def moves(self):
        """Return what can happen next without the will of a user."""
        can = [
            (self.deliver, *pair)
            for pair, queue in self.queues.items()
            if queue and pair[1] not in self.hangs
        ]
        can += [(self.dead.add, rank) for rank in sorted(self.to_kill - self.dead)]
        for rank in self.live():
            if rank in self.hangs:
                continue
            can += [(self.see, rank, d) for d in sorted(self.dead - self.seen[rank])]
            if self.to_clear[rank] is not None and self.states[rank].phase is Phase.HEALING:
                can.append((self.clear, rank))
            state = self.states[rank]
            is_at_work = state.phase is Phase.WORKING and not self.over[rank]
            sees_a_reason = state.has_new_loss or state.must_follow
            is_needed = (is_at_work and sees_a_reason) or state.must_heal
            if is_needed and rank not in self.is_leaving:
                can.append((self.handle, rank, ea.Heal()))
        return can

    def finish(self):
        """Let everything happen that can happen, and each rank that works finish its run."""
        for _ in range(10_000):
            if moves := self.moves():
                call, *arguments = moves[0]
                call(*arguments)
                continue
            if todo := [r for r in self.live() if self.can_finish(r)]:
                for rank in todo:
                    self.handle(rank, ea.Finish())
            elif not self.evict():
                return
        raise AssertionError("the job never comes to rest")

    def rest(self, until=lambda: False):
        """Let everything happen that can happen by itself."""
        while (moves := self.moves()) and not until():
            call, *arguments = moves[0]
            call(*arguments)

    def near(self, rank):
        return {each for each in range(self.size) if self.hosts[each] == self.hosts[rank]}

    def evict(self):
        """Let one that waits in vain do what eviction() says; return False if nobody waits.

        Time passes: who may kill at once does so before others, and who must give up comes last.
        """
        waits = []
        for rank in self.live():
            missing = frozenset(self.missing(rank)) - self.dead
            if rank in self.hangs or not missing:
                continue
            state = self.states[rank]
            here = [m for m in state.view.members if m == rank or m in state.colleagues]
            may = eviction(missing, here, self.near(rank))
            if (rank, missing) in self.evicted:
                may = Eviction.NEVER
            waits.append((may, rank, missing))
        if not waits:
            return False
        may, rank, missing = min(waits)
        if may is Eviction.NEVER:
            self.assert_may_give_up(rank)
            self.has_given_up = True
            self.handle(rank, ea.GiveUp())
        else:
            self.evicted.add((rank, missing))
            self.handle(rank, ea.EvictRanks(missing))
        return True

    def assert_may_give_up(self, rank):
        """Check that of its view at least as many hang as do not, or some cannot be killed."""
        live = [m for m in self.states[rank].view.members if m not in self.dead]
        n_hang = len(self.hangs.intersection(live))
        assert 2 * n_hang >= len(live) or not self.hangs - self.dead <= self.near(rank)

    def missing(self, rank):
        state = self.states[rank]
        waits = state.phase in (Phase.HEALING, Phase.FINISHING) and state.is_member
        return state.missing if waits and not self.over[rank] else ()

    def can_heal(self, rank):
        state = self.states[rank]
        grows = state.wants_another_size and rank == state.view.members[0]
        return self.can_finish(rank) and (state.has_new_loss or grows)

    def can_finish(self, rank):
        at_work = self.states[rank].phase is Phase.WORKING and not self.over[rank]
        return at_work and rank not in self.is_leaving and rank not in self.hangs


@dataclass(frozen=True)
class Commit:
    """What a process has committed: how often, where its sampler was, the samples that it has."""

    n: int
    position: dict
    samples: tuple[int, ...] = ()


class Training(Job):
    """A job that trains on each sample of an epoch, in steps that all members of a view make.

    As elastic.run does it: at first in a view, all get the newest commit; then each step ends with
    a commit. A process has the result of an operation once all members have begun it, if it does
    not see a loss before.
    """

    def __init__(self, n_members, n_spares, n_samples, batch_size, hosts=None):
        super().__init__(n_members + n_spares, n_spares, hosts)
        self.n_samples, self.batch_size = n_samples, batch_size
        start = {"epoch": 0, "phases": (), "first_size": n_members}
        self.first = Commit(0, start)
        self.commits = [self.first] * self.size
        self.begun = defaultdict(dict)  # (view, operation) -> what each member has brought
        self.at = [(0, 0)] * self.size  # the next operation
        self.waits = set()  # in the operation before that
        self.samplers = [None] * self.size

    def install(self, rank, view):
        super().install(rank, view)
        self.at[rank] = (view.number, 0)
        self.waits.discard(rank)
        self.samplers[rank] = None

    def handle(self, rank, event, most_sends=None):
        super().handle(rank, event, most_sends)
        if not self.states[rank].is_member:
            self.commits[rank] = self.first  # others may go on from another commit

    def moves(self):
        can = super().moves()
        for rank in self.live():
            is_at_work = rank in self.is_working and self.states[rank].phase is Phase.WORKING
            if not is_at_work or self.over[rank] or rank in self.hangs | self.is_leaving:
                continue
            if rank not in self.waits and not self.is_through(rank):
                can.append((self.begin, rank))
            elif rank in self.waits and not self.absent(rank):
                can.append((self.end, rank))
        return can

    def is_through(self, rank):
        return self.samplers[rank] is not None and self.commits[rank].position["epoch"] == 1

    def begin(self, rank):
        sampler = self.samplers[rank]
        self.begun[self.at[rank]][rank] = next(sampler[1]) if sampler else self.commits[rank]
        self.waits.add(rank)

    def absent(self, rank):
        """Return the members that have not begun the operation in which a rank waits."""
        return set(self.states[rank].view.members) - self.begun[self.at[rank]].keys()

    def end(self, rank):
        brought = self.begun[self.at[rank]]
        view = self.states[rank].view
        if self.samplers[rank] is None:
            newest = max(each.n for each in brought.values())
            (commit,) = {c.samples: c for c in brought.values() if c.n == newest}.values()
            sampler = ShardedSampler(
                self.n_samples, remainder="uneven", rank=view.rank_of(rank), size=view.size
            )
            sampler.set_elastic_position(commit.position)
            self.commits[rank] = commit
            self.samplers[rank] = sampler, iter(sampler.batches(self.batch_size))
        else:
            commit, (sampler, _) = self.commits[rank], self.samplers[rank]
            of_all = [index for member in view.members for index in brought[member]]
            self.commits[rank] = Commit(
                commit.n + 1, sampler.elastic_position(), (*commit.samples, *of_all)
            )
        self.waits.discard(rank)
        self.at[rank] = (view.number, self.at[rank][1] + 1)

    def can_finish(self, rank):
        return super().can_finish(rank) and rank not in self.waits and self.is_through(rank)

    def can_heal(self, rank):
        # Rank 0 stops for others after a commit; a loss is seen at any time.
        state = self.states[rank]
        is_well = Job.can_finish(self, rank)
        grows = state.wants_another_size and rank == state.view.members[0]
        return is_well and (
            state.has_new_loss or (grows and rank not in self.waits and self.at[rank][1] > 1)
        )

    def missing(self, rank):
        if rank in self.waits and self.states[rank].phase is Phase.WORKING:
            return self.absent(rank)
        return super().missing(rank)


def steps(job, data, *, most=9, any_may_hang=False):
    """Do a few things that a user or a fault does, and things that follow, in any order.

    most: 9, or more, so that less goes wrong; ranks hang then, too, less than half of them unless
    any_may_hang.
    """
    for _ in range(data.draw(st.integers(0, 90))):
        if job.hangs.issuperset(job.live()):
            return
        live = [rank for rank in job.live() if rank not in job.hangs]
        chosen = data.draw(st.integers(0, most))
        rank = live[data.draw(st.integers(0, len(live) - 1))]
        moves = job.moves()
        if chosen == 0 and len(live) > 1:
            job.dead.add(rank)
        elif chosen == 1 and job.can_finish(rank):
            n = data.draw(st.none() | st.integers(0, job.size)) if len(live) > 1 else None
            job.handle(rank, ea.Finish(), n)
        elif chosen == 2 and len(live) > 1 and job.can_heal(rank):
            job.handle(rank, ea.Heal(), data.draw(st.none() | st.integers(0, job.size)))
        elif chosen == 4 and job.can_finish(rank) and data.draw(st.booleans()):
            job.handle(rank, ea.Resize(data.draw(st.integers(1, job.size))))
        elif chosen == 3 and job.states[rank].phase is Phase.OUTSIDE:
            n = data.draw(st.none() | st.integers(0, job.size)) if len(live) > 1 else None
            job.handle(rank, ea.Arrive(), n)
        elif chosen == 10 and (any_may_hang or 2 * (len(job.hangs - job.dead) + 1) < len(live)):
            job.hangs.add(rank)
        elif moves:
            call, *arguments = moves[data.draw(st.integers(0, len(moves) - 1))]
            call(*arguments)
