"""After ranks are lost, those that are left share the rest of an epoch: each sample once."""

import numpy as np
import pytest
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

import ringcomm as rc
from ringcomm.data import Loader, ShardedSampler
from ringcomm.data.epoch_order import epoch_order
from ringcomm.elastic import ObjectState


def position_of(sampler, batches, n, is_ahead=False):
    """Take n batches; return them and the position after them.

    is_ahead: all others are dealt out, too, as to a Loader, which loads some ahead.
    """
    iterator = iter(batches)
    taken = [next(iterator) for _ in range(n)]
    if not is_ahead:
        return taken, sampler.elastic_position()
    for _ in iterator:
        pass
    return taken, sampler.elastic_position(n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    batch_size=st.integers(1, 9),
    constant=st.sampled_from(["global", "local"]),
    data=st.data(),
)
def test_each_sample_of_an_epoch_is_dealt_once_whoever_is_lost_and_when(
    n, sizes, batch_size, constant, data
):
    seen, position = [], {"epoch": 0, "phases": (), "first_size": sizes[0]}
    for size in sizes:
        samplers = [
            ShardedSampler(n, seed=3, remainder="uneven", rank=r, size=size) for r in range(size)
        ]
        for sampler in samplers:
            sampler.set_elastic_position(position)
        if samplers[0].epoch:
            break
        is_last = size is sizes[-1]
        batches = [sampler.batches(batch_size, constant=constant) for sampler in samplers]
        n_batches = len(batches[0])
        k = n_batches if is_last else data.draw(st.integers(0, n_batches))
        is_ahead = data.draw(st.booleans())
        positions = []
        for sampler, mine in zip(samplers, batches, strict=True):
            taken, at = position_of(sampler, mine, k, is_ahead)
            seen += [index for batch in taken for index in batch]
            positions.append(at)
        assert all(at == positions[0] for at in positions), "all ranks know the same position"
        position = positions[0]
    if position["epoch"] == 1:
        assert sorted(seen) == list(range(n))
    assert len(set(seen)) == len(seen)


def test_a_loss_after_the_end_of_an_epoch_has_been_loaded_takes_no_sample():
    seen, position = [], {"epoch": 0, "phases": (), "first_size": 5}
    for size, n_steps in ((5, 3), (4, 7), (3, 1)):
        positions = []
        for rank in range(size):
            sampler = ShardedSampler(203, seed=3, remainder="uneven", rank=rank, size=size)
            sampler.set_elastic_position(position)
            taken, at = position_of(sampler, sampler.batches(4), n_steps, is_ahead=True)
            seen += [index for batch in taken for index in batch]
            positions.append(at)
        assert all(at == positions[0] for at in positions)
        position = positions[0]
    assert position["epoch"] == 1
    assert sorted(seen) == list(range(203))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 200),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    batch_size=st.integers(1, 9),
    data=st.data(),
)
def test_a_step_has_the_samples_that_it_would_have_without_a_loss(n, sizes, batch_size, data):
    per_step = batch_size * sizes[0]
    order = epoch_order(n, seed=3, epoch=0, is_shuffled=True).tolist()
    steps = [set(order[at : at + per_step]) for at in range(0, n, per_step)]
    step, position = 0, {"epoch": 0, "phases": (), "first_size": sizes[0]}
    for size in sizes:
        ranks = [
            ShardedSampler(n, seed=3, remainder="uneven", rank=r, size=size) for r in range(size)
        ]
        for sampler in ranks:
            sampler.set_elastic_position(position)
        k = data.draw(st.integers(0, len(steps) - step))
        taken, at = zip(
            *(position_of(each, each.batches(batch_size), k) for each in ranks), strict=True
        )
        for batches in zip(*taken, strict=True):
            mine = [index for batch in batches for index in batch]
            # A rank that has no sample for the last step moves one there; see Batches.
            assert step >= len(steps) - 2 or set(mine) == steps[step]
            assert max(map(len, batches)) - min(map(len, batches)) <= 1 or step >= len(steps) - 2
            step += 1
        position = at[0]
        if position["epoch"]:
            break


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_goes_on_behind_the_batches_that_were_trained_on(prefetch):
    x = np.arange(50)

    def body(rank):
        loader = Loader(x, 4, sampler=ShardedSampler(50, remainder="uneven"), prefetch=prefetch)
        state = ObjectState(loader=loader, seen=[])
        state.sync()
        for number, batch in enumerate(loader):
            if number == 3:  # this step fails
                break
            state.seen = [*state.seen, *batch.tolist()]
            state.commit()
        state.restore()
        assert state.loader is loader
        for epoch in range(loader.sampler.epoch, 1):
            assert epoch == 0
            for batch in loader:
                state.seen = [*state.seen, *batch.tolist()]
                state.commit()
        assert loader.sampler.epoch == 1
        return rc.allgather_object(state.seen)

    for seen in run_ranks(2, body):
        assert sorted(index for each in seen for index in each) == list(range(50))
