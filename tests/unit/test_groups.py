"""Groups: some of the ranks, numbered among themselves."""

import gc
import pickle
import random
import threading
from contextlib import nullcontext as nothing
from types import SimpleNamespace

import numpy as np
import pytest
from harness import at_length, outcomes, run_ranks
from loopback import LoopbackHub, LoopbackTransport
from sample_values import total, whole_numbers

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.meet_and_leave import leave
from ringcomm.engine.peers import groups
from ringcomm.transport.node.shared_memory import SharedNode
from ringcomm.transport.start_mpi import agreed_tags
from ringcomm.transport.tags import DATA, TagLayout

pytestmark = pytest.mark.usefixtures("wire")


def only(rank, ranks):
    """Make a group as its members do."""
    return rc.Group(ranks) if rank in ranks else None


@pytest.mark.parametrize("ranks", [[0], [2], [0, 2], [3, 1], [1, 2, 3], [3, 2, 1, 0]])
def test_ranks_root_and_order_are_those_of_the_group(ranks):
    def body(rank):
        group = only(rank, ranks)
        if group is None:
            return None
        assert group.ranks == tuple(ranks)
        assert (group.rank, group.size) == (ranks.index(rank), len(ranks))
        root = len(ranks) - 1
        return (
            rc.allreduce(np.array([rank]), group=group).item(),
            rc.allgather(np.array([rank]), group=group).tolist(),
            rc.broadcast(np.array([rank]), root, group=group).item(),
            rc.broadcast_object(rank, root, group=group),
            rc.allgather_object(rank, group=group),
            rc.scatter(np.arange(len(ranks)), root, group=group).tolist(),
            rc.alltoall(np.full(len(ranks), rank), group=group).tolist(),
        )

    results = run_ranks(4, body)
    for rank, result in enumerate(results):
        if rank not in ranks:
            assert result is None
            continue
        last = ranks[-1]
        assert result == (sum(ranks), ranks, last, last, ranks, [ranks.index(rank)], ranks)


def test_a_group_may_be_made_by_all_and_used_by_its_members_alone():
    def body(rank):
        group = rc.Group([0, 2])
        if rank != 1:
            return rc.allreduce(np.ones(1), group=group).item()
        assert group.rank is None
        for call in (rc.allreduce, rc.allreduce_async, rc.allgather_object):
            with pytest.raises(ValueError, match=r"rank 1 is not a member of Group\(\[0, 2\]\)"):
                call(np.ones(1), group=group)
        with pytest.raises(ValueError, match="rank 1 is not a member"):
            rc.send(np.ones(1), 0, group=group)
        return None

    assert run_ranks(3, body) == [2.0, None, 2.0]


def test_nested_and_overlapping_groups_do_not_mix():
    def body(rank):
        groups = [only(rank, r) for r in ([0, 1, 2, 3], [0, 1], [1, 2], [2, 3], [1, 2], [0, 3])]
        handles = []
        order = [i for i, group in enumerate(groups) if group is not None]
        random.Random(rank).shuffle(order)
        for i in order:
            handles += [
                (i, rc.allreduce_async(np.full(9, 10**i), group=groups[i])) for _ in range(3)
            ]
        return {i: handle.wait()[0] for i, handle in handles}

    def want(rank):
        sizes = {0: (4, range(4)), 1: (2, (0, 1)), 2: (2, (1, 2)), 3: (2, (2, 3)), 4: (2, (1, 2))}
        sizes[5] = (2, (0, 3))
        return {i: n * 10**i for i, (n, members) in sizes.items() if rank in members}

    assert run_ranks(4, body) == [want(rank) for rank in range(4)]


def test_operations_of_two_groups_may_start_in_other_order_on_each_rank():
    def body(rank):
        first, second = rc.Group([0, 1]), rc.Group([0, 1])
        order = [first, second] if rank else [second, first]
        handles = {id(g): rc.allreduce_async(np.ones(1), group=g) for g in order}
        return [handles[id(g)].wait().item() for g in (first, second)]

    assert run_ranks(2, body) == [[2.0, 2.0]] * 2


def test_members_that_order_the_ranks_differently_all_hear_of_it():
    def body(rank):
        with pytest.raises(rc.MismatchError, match=r"\[0, 1\].*\[1, 0\]"):
            rc.Group([0, 1] if rank == 0 else [1, 0])
        return rc.allreduce(np.ones(1), group=rc.Group([1, 0])).item()

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 2], "there is no rank 2"),
        ([-1], "there is no rank -1"),
        ([0, 0], "twice"),
        ([], "at least one"),
    ],
)
def test_bad_ranks_are_refused(ranks, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            rc.Group(ranks)

    run_ranks(2, body)


@pytest.mark.parametrize("group", [[0, 1], 3, "world"])
def test_a_group_that_is_none_is_refused(group):
    def body(rank):
        with pytest.raises(TypeError, match=r"group must be a ringcomm\.Group"):
            rc.allreduce(np.ones(1), group=group)

    run_ranks(2, body)


def test_mismatch_in_a_group_names_the_ranks_of_the_job():
    def body(rank):
        group = only(rank, [3, 1])
        if group is None:
            return None
        with pytest.raises(rc.MismatchError) as caught:
            rc.allreduce(np.ones(1 + (rank == 1)), group=group, name="w")
        return str(caught.value), rc.allreduce(np.ones(1), group=group).item()

    results = run_ranks(4, body)
    assert results[1] == results[3]
    assert "rank 3 sent float64 (1,), rank 1 sent float64 (2,)" in results[1][0]


def test_a_root_outside_the_group_is_refused():
    def body(rank):
        group = only(rank, [1, 2])
        if group is not None:
            with pytest.raises(ValueError, match="root is 2; ranks are 0 to 1"):
                rc.broadcast(np.ones(1), 2, group=group)

    run_ranks(3, body)


class TellingHub(LoopbackHub):
    """A hub that tells when a rank has been killed."""

    def __init__(self, size, nodes):
        super().__init__(size, nodes)
        self.has_killed = threading.Event()

    def kill(self, *args, **options):
        super().kill(*args, **options)
        self.has_killed.set()


def test_a_death_outside_the_group_does_not_hinder_it(wire):
    def body(rank):
        group = only(rank, [0, 1])
        founded.wait(60)  # a barrier() that rank 2 has left may still keep the others
        if rank == 2:
            raise ValueError("boom")
        assert hub.has_killed.wait(60)
        assert rc.allreduce(np.ones(1), group=group).item() == 2
        with pytest.raises(rc.PeerFailedError, match="boom"):
            rc.barrier()
        return True

    founded = threading.Barrier(3)
    hub = TellingHub(3, (0, 0, 0) if wire == "node" else None)
    assert outcomes(3, body, hub=hub)[:2] == [True, True]


def test_a_group_waits_for_its_own_members_and_names_them():
    def body(rank):
        group = only(rank, [0, 1])
        if rank == 0:
            with pytest.raises(
                rc.CommTimeoutError, match=r"of Group\(\[0, 1\]\).* rank 1,"
            ) as told:
                rc.barrier(group=group)
            return told.value.missing
        return None

    assert run_ranks(3, body, settings=Settings(timeout_s=0.2))[0] == (1,)


def test_a_group_cannot_be_sent_or_used_by_another_engine():
    groups = []

    def body(rank):
        group = rc.Group([0, 1])
        with pytest.raises(TypeError, match="belongs to this process"):
            pickle.dumps(group)
        if rank == 0:
            groups.append((group, engine()))

    def again(rank):
        with pytest.raises(ValueError, match=r"of an earlier ringcomm\.init"):
            rc.barrier(group=groups[0][0])

    run_ranks(2, body)
    run_ranks(1, again)


def test_a_member_without_memory_is_an_error_on_all_of_them(wire, monkeypatch):
    def make_team(node, context, members):
        if node._rank == 1 and context and not failed:
            failed.append(context)
            raise MemoryError("std::bad_alloc")
        return real(node, context, members)

    def body(rank):
        said = []
        for _ in range(2):
            try:
                group = only(rank, [0, 1])
            except rc.RingcommError as error:
                said.append(str(error))
            else:
                said.append(rc.allreduce(np.ones(1), group=group).item() if group else 0.0)
        return said

    failed, real = [], SharedNode._make_team
    monkeypatch.setattr(SharedNode, "_make_team", make_team)
    *members, other = run_ranks(3, body)
    assert other == [0.0, 0.0]
    if wire == "messages":  # nobody needs memory
        assert members == [[2.0, 2.0]] * 2
        return
    (others, total), (own, own_total) = members
    assert "rank 1 cannot take part (its own error says why), so no member has the" in others
    assert "rank 1 cannot take part (MemoryError: std::bad_alloc), so no member" in own
    assert total == own_total == 2.0


def test_groups_in_use_are_as_many_as_there_are_contexts(monkeypatch):
    monkeypatch.setattr(LoopbackTransport, "tags", TagLayout(787432, 3, 1 << 16))
    monkeypatch.setattr(groups, "_PAUSE_S", 0.01)

    def refuse():
        refusal = "2 groups in use, which is the limit: .* tags up to 787432"
        with pytest.raises(rc.RingcommError, match=refusal):
            rc.Group([0, 1])

    def body(rank):
        groups = [rc.Group([0, 1]) for _ in range(2)]
        refuse()
        with pytest.raises(rc.MismatchError, match=r"Group\(\[1, 0\]\)"):
            rc.Group([rank, 1 - rank])  # of one too many, too
        groups.pop(rank)
        refuse()  # for each has been dropped by one rank alone
        groups.clear()
        groups += [rc.Group([0, 1]) for _ in range(2)]
        return rc.allreduce(np.ones(1), group=groups[1], name="w").item()

    assert run_ranks(2, body) == [2.0, 2.0]


@pytest.mark.long
def test_a_context_is_used_again_and_nothing_of_its_last_group_is_left(monkeypatch):
    """Few contexts, so each is used again all the time; operations outlast the references."""
    monkeypatch.setattr(LoopbackTransport, "tags", TagLayout((1 << 22) - 1, 16, 1 << 16))
    ranks = ([0, 1, 2], [2, 0], [1, 2], [1, 0, 2], [0, 1], [0])
    n_groups = at_length(5000, 100)

    def body(rank):
        pending, n_wrong = [], 0
        for index in range(n_groups):
            group = only(rank, ranks[index % len(ranks)])
            if group is None:
                continue
            count = 70_001 if index % 50 == 0 else 1 + index % 257
            x = np.random.default_rng(index).random(count)
            begun = [rc.allreduce_async(x * (group.rank + 1), group=group)]
            for _ in range(1 + index % 2):  # agreed on, then cached
                begun.append(
                    rc.allreduce_async(x * (group.rank + 2), group=group, name="w", op=rc.MAX)
                )
                rc.allgather(np.array([rank]), group=group)
                if index % 2:
                    begun[-1].wait()
            n = group.size
            pending.append((begun, x * (n * (n + 1) // 2), x * (n + 1)))
            del group
            if len(pending) > index % 3 + rank % 2:
                (total, *highest), want_total, want_highest = pending.pop(0)
                n_wrong += not np.allclose(total.wait(), want_total, rtol=1e-12)
                n_wrong += sum(not np.array_equal(h.wait(), want_highest) for h in highest)
        for begun, *_ in pending:
            [handle.wait() for handle in begun]
        pending.clear()
        rc.barrier()
        return n_wrong, engine().groups._next_id

    results = run_ranks(3, body)
    assert [n_wrong for n_wrong, _ in results] == [0, 0, 0]
    assert max(next_id for _, next_id in results) > n_groups * 0.9


def test_a_context_is_not_used_again_while_one_member_knows_of_a_message_in_it():
    """As of a view that is over: nobody receives what was sent in it."""

    def body(rank):
        old = rc.Group([0, 1])
        context, tags = old.ledger.context, engine().transport.tags
        for stream in (*range(8), *range(tags.n_streams // 2, tags.n_streams // 2 + 8)):
            if rank == 0:
                late = np.full(257 * 8, 99, np.uint8)
                engine().transport.isend(late, 1, tags.tag(context, stream, DATA))
                old.ledger.is_spoiled = True
        del old
        wrong = 0
        for turn in range(6):
            group = rc.Group([turn % 2, 1 - turn % 2])
            assert group.ledger.context != context
            for name in (None, "w", "w"):
                mine = whole_numbers(rank, 257, turn=turn)
                got = rc.allreduce(mine, group=group, name=name)
                wrong += not np.array_equal(got, total(2, 257, turn=turn))
            del group
        return wrong

    assert run_ranks(2, body) == [0, 0]


def test_a_context_is_not_used_again_after_a_mismatch_that_left_messages():
    def body(rank):
        group = rc.Group([0, 1])
        for _ in range(2):
            rc.allreduce(np.ones(300_000), group=group, name="w")
        with pytest.raises(rc.MismatchError):
            rc.allreduce(np.full(300_000 + rank, 7.0), group=group, name="w")
        del group
        totals = []
        for index in range(4):
            gc.collect()
            group = rc.Group([0, 1])
            mine = np.full(300_000, 10.0**index + rank)
            totals += [rc.allreduce(mine, group=group, name="w") for _ in range(2)]
            del group
        return [set(total) for total in totals]

    assert run_ranks(2, body) == [[{2 * 10.0 ** (i // 2) + 1} for i in range(8)]] * 2


@pytest.mark.parametrize(
    ("largest_tag", "n_contexts", "n_streams"),
    [
        (2**31 - 1, 1024, 1 << 16),
        (2**28 - 1, 1024, 1 << 16),
        (2**23 - 1, 256, 1 << 13),
        (3 * 2**20, 384, 1 << 11),
        (2**15 - 1, 32, 1 << 8),
    ],
)
def test_the_wire_decides_how_a_tag_is_divided(largest_tag, n_contexts, n_streams):
    tags = TagLayout.within(largest_tag)
    assert (tags.n_contexts, tags.n_streams) == (n_contexts, n_streams)
    assert tags.tag(n_contexts - 1, n_streams - 1, 3) <= largest_tag
    made = {tags.tag(c, s, k) for c in (0, 1, 31) for s in (0, 1, n_streams - 1) for k in range(4)}
    assert len(made) == 36


def test_the_fewest_tags_of_all_ranks_count_and_too_few_are_refused():
    class World:
        def Get_attr(self, key):
            return {"TAG_UB": 2**31 - 1}[key]

        def allreduce(self, mine, op):
            return op(mine, fewest)

    mpi = SimpleNamespace(COMM_WORLD=World(), TAG_UB="TAG_UB", MIN=min)
    fewest = 2**23 - 1
    assert agreed_tags(mpi, mpi.COMM_WORLD) == TagLayout.within(2**23 - 1)
    fewest = 32766
    with pytest.raises(rc.ConfigError, match=r"needs message tags up to 32767.* up to 32766 \(TAG"):
        agreed_tags(mpi, mpi.COMM_WORLD)


def test_all_goes_well_with_as_few_tags_as_mpi_must_have(monkeypatch):
    """Names and operations in flight are more than there are streams for."""
    monkeypatch.setattr(LoopbackTransport, "tags", TagLayout.within(2**15 - 1))

    def body(rank):
        lanes = [rc.Group([1, 0]), None]
        sums = []
        for turn in range(3):
            handles = [
                rc.allreduce_async(np.full(7, 1000.0 * turn + i + rank), group=lane, name=name)
                for i in range(15)
                for lane in lanes
                for name in (None, f"{turn} {i}" if i % 2 else f"{i}")
            ]
            assert len(handles) == 60
            sums += [handle.wait()[3] for handle in handles]
            peer = np.empty(2, int)
            rc.sendrecv(np.array([turn, rank]), dest=1 - rank, out=peer, source=1 - rank)
            sums.append(float(peer[0]))
        return sums

    expected = []
    for turn in range(3):
        expected += [2 * (1000.0 * turn + i) + 1 for i in range(15) for _ in range(4)] + [turn]
    assert run_ranks(2, body) == [expected] * 2


def test_who_leaves_one_group_does_not_hinder_another_of_the_same_context():
    """Groups without a common rank have the same context, hence the same keys."""
    gone = threading.Event()

    def body(rank):
        group = rc.Group([0, 1] if rank < 2 else [2, 3])
        if rank == 3:
            gone.set()
            return leave(engine(), "called shutdown()")
        if rank == 2:
            assert gone.wait(60)
            with pytest.raises(rc.PeerFailedError, match="rank 3 called shutdown") as caught:
                rc.barrier(group=group)
            told.set()
            raise caught.value  # else rank 3 would wait for this one to leave
        if rank == 1:
            assert told.wait(60)
        rc.barrier(group=group)
        return "met"

    told = threading.Event()
    assert outcomes(4, body)[:2] == ["met", "met"]
    assert told.is_set()


def test_a_rank_that_cannot_go_on_is_no_riddle_to_its_other_groups():
    def body(rank):
        pair, other = only(rank, [0, 1]), only(rank, [0, 2])
        if rank == 2:
            raise ValueError("boom")
        if rank == 0:
            with pytest.raises(rc.PeerFailedError, match="boom"):
                rc.barrier(group=other)
            assert told.wait(60)
            return "told"
        with pytest.raises(rc.PeerFailedError, match="boom") as caught:
            rc.barrier(group=pair)
        told.set()
        return caught.value.rank

    told = threading.Event()
    assert outcomes(3, body)[:2] == ["told", 2]


def described(group):
    """Return who is in a group, and what its ranks say."""
    if group is None:
        return None
    ranks = rc.allgather(np.array([engine().job_rank]), group=group)
    return group.ranks, group.rank, ranks.tolist()


@pytest.mark.parametrize(
    ("colors", "keys", "want"),
    [
        ([0, 1, 0, 1], [None] * 4, [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ([7, 7, 7, 7], [3, -1, 3, -(2**63)], [(3, 1, 0, 2)] * 4),
        ([0, None, 2**63 - 1, 0], [1, 0, 0, 0], [(3, 0), None, (2,), (3, 0)]),
        ([None] * 4, [0] * 4, [None] * 4),
        ([np.int8(5), 5, np.array(5), 6], [0, np.uint64(2), 1, 0], [(0, 2, 1)] * 3 + [(3,)]),
    ],
)
def test_a_split_gives_each_color_a_group_ordered_by_key_then_by_rank(colors, keys, want):
    results = run_ranks(4, lambda r: described(rc.split(colors[r], keys[r])))
    due = [ranks and (ranks, ranks.index(r), list(ranks)) for r, ranks in enumerate(want)]
    assert results == due


def test_a_split_of_a_group_is_made_by_its_members_alone():
    def body(rank):
        group = only(rank, [3, 1, 0])
        if group is None:
            return None
        part = rc.split(0 if rank else 1, group=group)
        return described(part), described(rc.split(0, -rank, group=part))

    alone = ((0,), 0, [0])
    assert run_ranks(4, body) == [
        (alone, alone),
        (((3, 1), 1, [3, 1]), ((3, 1), 1, [3, 1])),
        None,
        (((3, 1), 0, [3, 1]), ((3, 1), 0, [3, 1])),
    ]


BAD_COLORS = {"color is -1; it must be an int >= 0, or None": -1, "color must be an int": True}
BAD_COLORS |= {"color must be": 0.0, "not '1'": "1", f"color is {2**63}": 2**63}


def test_a_wrong_color_on_one_rank_is_an_error_on_all():
    def body(rank):
        for text, color in BAD_COLORS.items():
            with pytest.raises(rc.MismatchError, match="rank 1 could not take part") as told:
                rc.split(color if rank == 1 else 0)
            assert text in str(told.value)
            with pytest.raises((TypeError, ValueError), match=text):
                rc.split(color)
        for key in (0.5, 2**63):
            with pytest.raises((TypeError, ValueError), match="split: key"):
                rc.split(0, key)
        with pytest.raises(ValueError, match="is not a member") if rank == 2 else nothing():
            rc.split(0, group=rc.Group([0, 1]))
        return rc.split(rank % 2).size

    assert run_ranks(3, body) == [2, 1, 2]


def test_a_split_beside_another_call_or_a_rank_in_join_is_a_mismatch():
    def body(rank):
        with pytest.raises(rc.MismatchError, match="rank 0 called split #1, rank 1 called allgath"):
            rc.split(0) if rank == 0 else rc.allgather(np.zeros((1, 2), np.int64))
        if rank == 0:
            with pytest.raises(
                rc.MismatchError, match=r"has called join\(\), so it has nothing to"
            ):
                rc.split(0)
        return rc.join()

    assert len(set(run_ranks(2, body))) == 1
