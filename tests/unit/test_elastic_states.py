"""States of elastic training: what a commit keeps, and whose commit all ranks get."""

import copy
import sys
import weakref
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.elastic import ArrayState, ObjectState, State, views
from ringcomm.elastic.checksum import checksum_of
from ringcomm.elastic.run import _run, differences, outline_of
from ringcomm.elastic.state import HostsUpdatedInterrupt
from ringcomm.engine.api import begin_next_view
from ringcomm.errors import NewViewInterrupt


def both(**values):
    """Return a state of each class; an ObjectState takes arrays, too."""
    return [cls(**copy.deepcopy(values)) for cls in (ObjectState, ArrayState)]


def values_of(state):
    return state.step, state.x.tolist()


@pytest.mark.parametrize("call", [lambda: rc.elastic.request_scale(3), rc.elastic.leave])
def test_a_job_that_is_not_elastic_says_how_to_start_one(call):
    with pytest.raises(rc.RingcommError, match="`ringcomm run --elastic MIN:MAX`"):
        call()


def test_before_the_first_commit_all_get_what_rank_0_has():
    def body(rank):
        seen = []
        for state in both(step=rank + 5, x=np.full(3, rank)):
            state.sync()
            seen.append(values_of(state))
        return seen

    assert run_ranks(3, body) == [[(5, [0, 0, 0])] * 2] * 3


@pytest.mark.parametrize("cls", [ObjectState, ArrayState])
def test_all_get_the_commit_of_who_has_committed_most(cls):
    def body(rank):
        state = cls(step=0, x=np.zeros(3))
        state.sync()
        for step in range(1, 3 + (rank == 2)):  # rank 2 has completed a step that others lost
            state.step, state.x = step, _set(state.x, 10 * step)
            state.commit()
        state.step, state.x = 99, _set(state.x, 99)  # torn, and not committed
        state.sync()
        first = values_of(state)
        state.commit()
        state.step, state.x = 100, _set(state.x, 100)
        state.sync()  # all have committed equally often
        return first, values_of(state)

    expected = (3, [30, 30, 30])
    assert run_ranks(3, body) == [(expected, expected)] * 3


def _set(x, value):
    x[:] = value
    return x


def test_a_commit_that_was_interrupted_is_not_the_truth():
    def body(rank):
        state = ArrayState(step=0, x=np.zeros(2))
        state.sync()
        state.step, state.x[:] = 1, 1
        state.commit()
        if rank == 0:
            state.step = Interrupting()
            with pytest.raises(KeyboardInterrupt):
                state.commit()
        state.sync()
        return values_of(state)

    assert run_ranks(2, body) == [(1, [1, 1])] * 2


class Interrupting:
    def __deepcopy__(self, memo):
        raise KeyboardInterrupt


def test_if_all_were_interrupted_in_a_commit_the_error_says_what_to_do():
    def body(_):
        state = ObjectState(value=Interrupting())
        with pytest.raises(KeyboardInterrupt):
            state.commit()
        with pytest.raises(rc.RingcommError, match="Start the job again from a checkpoint"):
            state.sync()

    run_ranks(2, body)


@pytest.mark.parametrize("cls", [ObjectState, ArrayState])
def test_what_a_rank_got_from_one_that_is_lost_before_others_have_it_counts_for_nobody(cls):
    class Cut(cls):
        """Rank 2 gets nothing of the commit of rank 0, which is lost; rank 1 gets a part or all."""

        def receive(self, root, *, is_new):
            super().receive(root, is_new=is_new and rc.rank() == 1)
            raise rc.PeerFailedError("rank 0 is lost", rank=0, reason="is lost", view=0)

    def body(rank):
        state = cls(step=0, x=np.zeros(3))
        state.sync()
        for step in range(1, 2 + (rank == 0)):
            state.step, state.x = step, _set(state.x, step)
            state.commit()
        state.__class__ = Cut
        with pytest.raises(rc.PeerFailedError):
            state.sync()
        state.__class__ = cls
        return state

    left = run_ranks(3, body)[1:]  # they have committed equally often

    def go_on(rank):
        left[rank].sync()
        return values_of(left[rank])

    assert run_ranks(2, go_on) == [(1, [1, 1, 1])] * 2


def test_a_state_of_ones_own_that_was_half_received_is_not_the_truth():
    class Own(State):
        x = kept = 0

        def save(self):
            self.kept = self.x

        def restore(self):
            self.x = self.kept

        def receive(self, root, *, is_new):
            kept = rc.broadcast_object(self.kept, root)
            if is_new:
                self.kept = kept
            if self.fails:
                raise rc.PeerFailedError("rank 2 is lost", rank=2, reason="is lost", view=0)

    def body(rank):
        state = Own()
        state.sync()
        for state.x in range(1, 2 + (rank == 0)):
            state.commit()
        state.fails = True
        with pytest.raises(rc.PeerFailedError):
            state.sync()
        state.fails = False
        has_commit = state.has_commit
        state.sync()
        return has_commit, state.x

    Own.fails = False
    assert run_ranks(2, body) == [(True, 2), (False, 2)]


def test_who_only_came_does_not_begin_anew_when_all_that_had_the_state_are_lost():
    def body(_):
        state = ArrayState(step=0, x=np.zeros(2))
        state.forget_commits()  # as a spare that gets a place
        with pytest.raises(rc.RingcommError, match="all ranks that had the state of the job"):
            state.sync()

    run_ranks(2, body)


def test_who_came_before_the_first_commit_gets_the_values_of_a_rank():
    def body(rank):
        state = ArrayState(step=rank, x=np.full(2, rank))
        if rank == 0:
            state.forget_commits()
        state.sync()
        return values_of(state)

    assert run_ranks(2, body) == [(1, [1, 1])] * 2


class SyncOfItsOwn(ObjectState):
    def sync(self):
        self.x = rc.broadcast(self.x, 0)
        super().sync()


TURNS = ("step", "commit", "restore", "a loss", "again", "again, all being alike")


@pytest.mark.parametrize("cls", [ObjectState, ArrayState, SyncOfItsOwn])
def test_training_goes_on_from_the_last_commit_or_from_where_all_began_again(cls):
    def train_through(turns):
        state, rest = cls(step=0, x=np.zeros(2)), [*turns]
        now = kept = (0, [0, 0])
        resets, n_again = [], 0
        state.register_reset_callbacks([lambda: resets.append(1)])

        def train():
            nonlocal now, kept, n_again
            while True:
                assert values_of(state) == now, turns[: len(turns) - len(rest)]
                assert len(resets) == n_again, turns[: len(turns) - len(rest)]
                if not rest:
                    return
                turn = rest.pop(0)
                if turn == "step":
                    state.step += 1
                    state.x = _set(state.x, state.step)
                    now = values_of(state)
                elif turn == "commit":
                    state.commit()
                    kept = now
                elif turn.startswith("again"):
                    kept, n_again = now, n_again + 1
                    raise HostsUpdatedInterrupt(skip_sync=turn != "again")
                else:
                    state.restore() if turn == "restore" else state.resume()
                    now = kept

        _run(train, state, is_elastic=False)

    run_ranks(2, lambda _: [train_through(turns) for turns in product(TURNS, repeat=3)])


def test_what_the_calls_of_a_view_hold_goes_with_it_though_its_error_lives_on(monkeypatch):
    """Such as a DistributedDataParallel, whose hooks would add to those of the next one."""
    kept, refs = [], []

    def fail():
        try:
            raise rc.PeerFailedError("rank 1 died", rank=1, reason="died")
        except rc.PeerFailedError as error:
            kept.append(error)  # it is that of all handles of the old view, and knows its callers
            raise copy.copy(error) from None

    nothing = {"_begin": None, "_resume": None, "_record_view": None, "finish_run": None}
    replaced = {"is_outside": False, "_heal": True} | nothing
    module = sys.modules[_run.__module__]
    for name, value in replaced.items():
        monkeypatch.setattr(module, name, lambda *_, value=value, **__: value)
    is_loss = lambda error: isinstance(error, rc.PeerFailedError)  # noqa: E731
    monkeypatch.setattr(module, "end_of_view", lambda error: error if is_loss(error) else None)

    def train():
        assert [ref() for ref in refs] == [None] * len(refs)
        held = ObjectState()
        refs.append(weakref.ref(held))
        if len(refs) < 3:
            fail()
        return len(refs)

    assert _run(train, ObjectState(), is_elastic=True) == 3
    assert len(kept) == 2


def test_an_array_stays_the_users_own():
    x = np.zeros(3)
    state = ArrayState(x=x)
    state.commit()
    x[:] = 2
    state.restore()
    assert state.x is x
    assert (x == 0).all()
    state.x = np.ones(3)
    with pytest.raises(rc.RingcommError, match=r"state\.x\[:\] = \.\.\."):
        state.commit()


def test_arguments_that_make_no_sense_are_refused():
    for cls in (ObjectState, ArrayState):
        with pytest.raises(ValueError, match="the name 'commit' is taken"):
            cls(commit=1)
        with pytest.raises(ValueError, match="the name '_x' is taken"):
            cls(_x=1)
    with pytest.raises(TypeError, match="names holds objects"):
        ArrayState(names=np.array(["a", None], object))


def test_callbacks_of_a_reset_are_called_in_their_order():
    state, seen = ObjectState(), []
    state.register_reset_callbacks([lambda: seen.append(1), lambda: seen.append(2)])
    state.on_reset()
    assert seen == [1, 2]


def test_listeners_of_new_views_live_as_long_as_their_objects(monkeypatch):
    monkeypatch.setattr(views, "_listeners", [])  # not those of other tests
    seen = []

    class Holder:
        def __init__(self, name):
            self.name = name

        def note(self):
            seen.append(self.name)

    kept, dropped = Holder("kept"), Holder("dropped")
    for each in (kept, dropped):
        rc.elastic.on_new_view(each.note)
    del dropped, each
    views.tell_listeners()
    assert seen == ["kept"]


def test_what_a_rank_has_received_is_compared_and_so_is_a_commit_on_demand():
    class Forgetful(ArrayState):
        def receive(self, root, *, is_new):
            super().receive(root, is_new=is_new)
            if is_new:
                self._copies["x"][2] += 1

    def body(rank):
        state = ArrayState(step=0, x=np.zeros(3), names=["a", {"b": 1.5}])
        state.sync()
        state.x += 1
        state.commit()
        state.verify()
        state.x[1] += rank  # a rank adds something of its own
        state.commit()
        with pytest.raises(rc.MismatchError, match=r"rank 1's has .*; 2 ranks differ"):
            state.verify()
        with pytest.raises(rc.MismatchError, match="2 ranks differ from rank 0"):
            Forgetful(x=np.zeros(3)).sync()

    run_ranks(3, body)


def test_ranks_leave_only_once_those_that_stay_have_all_of_the_state(monkeypatch):
    state = SimpleNamespace(wants_another_size=True, is_member=True, size=2)
    membership, transport = SimpleNamespace(state=state), SimpleNamespace(rank=0)
    world = SimpleNamespace(membership=membership, transport=transport)
    monkeypatch.setattr(begin_next_view, "current", lambda: world)
    assert [begin_next_view.ranks_to_stay(n) for n in (1, 2, 5)] == [1, 2, 2]
    begin_next_view.stop_for_another_size(3)  # the next commit makes copies for two
    with pytest.raises(NewViewInterrupt):
        begin_next_view.stop_for_another_size(2)


def test_a_checksum_sees_each_value_its_type_and_its_place():
    values = [
        1, 1.0, True, "1", b"1", None, [], [1], [[1]], (1, 1), {"a": 1}, {"b": 1}, {"a": 1, "b": 1},
        np.zeros(2), np.zeros(2, np.float32), np.zeros((1, 2)), np.array([0.0, -0.0]),
    ]  # fmt: skip
    assert len({checksum_of(each) for each in values}) == len(values)
    assert checksum_of([1, 2]) != checksum_of([2, 1])
    assert checksum_of({"x": np.arange(3.0)}) == checksum_of({"x": np.arange(6.0)[:3].copy()})
    assert checksum_of(np.arange(6.0)[::2]) == checksum_of(np.array([0.0, 2.0, 4.0]))
    assert checksum_of(object()) == checksum_of(object())


def test_attributes_that_no_commit_keeps_are_not_part_of_the_outline_of_a_state():
    """A newcomer has not set them: the program does so while it trains."""
    for mine, others in zip(both(step=0, x=np.zeros(3)), both(step=7, x=np.ones(3)), strict=True):
        mine.seen, mine.step = [1], None
        assert differences(outline_of(mine), outline_of(others)) == ""


def test_differences_of_outlines_have_both_values_and_are_few():
    one = outline_of(ArrayState(step=0, x=np.zeros(3), y=np.zeros(2)))
    two = outline_of(ObjectState(step=0, x=0, a=1, b=2))
    assert differences(one, two) == (
        "its class is ArrayState here, and ObjectState in the job; x is float64 (3,) here, and a "
        "value in the job; a is nothing here, and a value in the job; and 2 more"
    )
