"""DistributedOptimizer(shard_state=1): masters of 16 bits, what it takes, and what it refuses."""

import gc
import weakref

import pytest
import torch
from harness import outcomes, run_ranks
from torch import nn, optim
from torch.nn.functional import mse_loss
from training_models import (
    SMALL,
    Checkpointed,
    Counting,
    adamw,
    assert_close,
    assert_sharded_equals_one_process,
    copies,
    data,
    fit,
    models,
    network,
    on_replicas,
    seeded,
    sgd,
    share,
    weights,
    wrap,
)

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.torch.zero import optimizer_shard


# --- 16 bits ------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_are_rounded_float32_masters(dtype, size):
    """Updates that are lost in 16 bits add up in float32, by gradients that were rounded once."""

    def body(rank):
        model = nn.Linear(7, 1, bias=False).to(dtype)
        nn.init.ones_(model.weight)
        optimizer = wrap(model, lambda p: optim.Adam(p, lr=1e-4), shard_state=1)
        for _ in range(40):
            optimizer.zero_grad()
            (model(torch.ones(1, 7, dtype=dtype)).sum() * (rank + 0.1)).backward()
            optimizer.step()
        return model.weight.detach(), optimizer.state_dict()["state"][0]

    master = nn.Parameter(torch.ones(1, 7))
    reference = optim.Adam([master], lr=1e-4)
    mean = sum(torch.tensor(rank + 0.1).to(dtype).float() for rank in range(size)) / size
    for _ in range(40):
        master.grad = mean.to(dtype).float().expand(1, 7).clone()
        reference.step()
    for weight, state in run_ranks(size, body):
        assert weight.dtype == dtype
        assert torch.equal(state["master"], master.detach())
        assert torch.equal(weight, master.detach().to(dtype))
        assert state["exp_avg"].dtype == torch.float32
        assert (weight < 1).all()


def test_16_bit_weights_that_a_user_changes_are_the_new_masters():
    replicas = copies(network(torch.bfloat16), 2)
    batches = data(3, 2, torch.bfloat16)

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, lambda p: optim.SGD(p, lr=0.0), shard_state=1)
        fit(model, optimizer, share(batches, rank, 2))
        for p in model.parameters():
            p.data.fill_(3.0)
        fit(model, optimizer, share(batches, rank, 2))
        return [float(p.detach().float().sub(3).abs().max()) for p in model.parameters()]

    assert run_ranks(2, body) == [[0.0] * 6] * 2


# --- in memory, and in time ---------------------------------------------------------------------
def test_each_rank_keeps_its_share_of_the_state_alone():
    size = 3
    replicas = models(size)

    def body(rank):
        optimizer = wrap(replicas[rank], adamw, shard_state=1)
        fit(replicas[rank], optimizer, share(data(3, size), rank, size))
        assert not optimizer.state
        held = [each for shard in optimizer._shards._shards for each in shard.states().values()]
        lines = [line for each in held for line in each.by_element.values()]
        storages = {line.untyped_storage().data_ptr(): line.untyped_storage() for line in lines}
        return sum(storage.nbytes() for storage in storages.values())

    held = run_ranks(size, body, settings=SMALL)
    whole = 2 * sum(p.numel() * 8 for p in replicas[0].parameters())
    assert sum(held) == whole
    buckets = 6
    assert max(held) <= whole / size + buckets * 2 * 8


def test_weights_leave_as_soon_as_their_chunk_is_updated(monkeypatch):
    log = {0: [], 1: []}

    def logged(name, function):
        def call(self, *args):
            log[rc.rank()].append(name)
            return function(self, *args)

        return call

    for name in ("update", "send", "note_written"):
        kind = optimizer_shard.BucketWeights
        monkeypatch.setattr(kind, name, logged(name, getattr(kind, name)))

    def body(rank, model, optimizer, _):
        fit(model, optimizer, share(data(1, 2), rank, 2))
        return len(optimizer._shards._shards)

    n, _ = on_replicas(2, body, shard_state=1)
    assert n > 2
    assert log[0] == log[1] == ["update", "send"] * n + ["note_written"] * n


def test_a_graph_of_old_weights_is_refused_by_autograd():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, data(2, 1))
        optimizer.zero_grad()
        ((x, y),) = data(1, 1)
        stale = mse_loss(model(x), y)
        stale.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stale.backward()

    on_replicas(2, body, shard_state=1)


def test_weights_that_were_moved_or_loaded_between_steps():
    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:3])
        for p in model.parameters():
            p.data = 0.5 * p.data
        fit(model, optimizer, batches[3:5])
        model.load_state_dict({name: 2 * p for name, p in model.state_dict().items()})
        fit(model, optimizer, batches[5:6])
        model.a.weight.data = model.a.weight.data.t()
        fit(model, optimizer, batches[6:])

    model = seeded(lambda: Checkpointed("reentrant").double())
    assert_sharded_equals_one_process(2, train, model=model, make=adamw, tolerance=1e-10)


@pytest.mark.parametrize("make", [sgd, lambda p: Counting(p, lr=0.1)])
def test_step_hooks_run_once_and_see_the_wrapped_optimizer(make):
    def body(rank, model, optimizer, _):
        seen = []
        optimizer.register_step_pre_hook(lambda each, *_: seen.append(each is optimizer))
        optimizer.register_step_post_hook(lambda each, *_: seen.append(each is optimizer))
        fit(model, optimizer, data(2, 1))
        return seen

    assert on_replicas(1, body, make, shard_state=1) == [[True] * 4]


def test_a_process_set_shares_among_its_ranks_alone():
    batches = data(4, 2)
    replicas = models(3)

    def body(rank):
        hvd.init()
        some = hvd.add_process_set([0, 2])
        model = replicas[rank]
        optimizer = wrap(model, adamw, process_set=some, shard_state=1)
        mine = share(batches, some.rank(), 2) if some.included() else batches
        fit(model, optimizer, mine)
        return weights(model)

    (single,) = models(1)
    fit(single, adamw(single.parameters()), batches)
    assert_close(run_ranks(3, body)[::2], weights(single), 1e-10)


# --- what is refused, and what goes wrong -------------------------------------------------------
class Mine(optim.SGD):
    pass


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        (optim.LBFGS, {}, TypeError, "LBFGS is not known .* Pass shard_state=0"),
        (optim.Adafactor, {}, TypeError, "Adafactor is not known"),
        (Mine, {}, TypeError, "Mine is not known .* set is_elementwise = True on the class"),
        (sgd, {"shard_state": 2}, ValueError, "shard_state is 0, or 1 for ZeRO-1, not 2. FSDP"),
        (sgd, {"op": hvd.Adasum}, ValueError, "Adasum .* needs shard_state=0"),
    ],
)
def test_what_cannot_be_shared_is_refused(make, arguments, error, message):
    def body(rank):
        with pytest.raises(error, match=message):
            wrap(network(), make, **{"shard_state": 1, **arguments})

    run_ranks(1, body)


def test_ranks_that_disagree_get_one_error_before_anything_is_sent():
    replicas = models(3)

    def body(rank):
        optimizer = wrap(replicas[rank], shard_state=int(rank != 1))
        with pytest.raises(rc.MismatchError, match=r"rank 0 has shard_state=1, rank 1 has .*=0"):
            fit(replicas[rank], optimizer, data(1, 1))
        assert rc.allreduce(torch.ones(1)).item() == 3

    run_ranks(3, body, settings=SMALL)


def test_sparse_gradients_are_refused_on_every_rank_and_training_can_go_on():
    tables = copies(seeded(lambda: nn.Embedding(4, 2, sparse=True)), 2)

    def body(rank):
        optimizer = wrap(tables[rank], shard_state=1)
        with pytest.raises(TypeError, match=r"of weight is sparse.*pass sparse_as_dense=True"):
            tables[rank](torch.tensor([rank])).sum().backward()
        optimizer.zero_grad()
        tables[rank].sparse = False
        tables[rank](torch.tensor([rank])).sum().backward()
        optimizer.step()
        return [tables[rank].weight.detach()]

    assert_close(run_ranks(2, body), run_ranks(1, lambda _: [tables[0].weight.detach()])[0], 0)


def test_gradients_that_are_kept_while_shares_change_are_refused():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, data(1, 1))
        ((x, y),) = data(1, 1)
        with pytest.raises(rc.RingcommError, match=r"call optimizer\.zero_grad\(\) between"):
            mse_loss(model(x), y).backward()
        fit(model, optimizer, data(2, 1))

    on_replicas(2, body, shard_state=1)


def test_a_gradient_set_by_hand_of_a_frozen_parameter_is_refused():
    (model,) = models(1)
    model[0].requires_grad_(False)

    def body(rank):
        optimizer = wrap(model, shard_state=1)
        model[0].weight.grad = torch.ones_like(model[0].weight)
        with pytest.raises(rc.RingcommError, match=r"0\.weight has a \.grad and is frozen"):
            optimizer.step()

    run_ranks(1, body)


@pytest.mark.parametrize("n_steps", [0, 2])
def test_a_dead_rank_ends_step_with_its_reason(n_steps):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:n_steps])
        optimizer.zero_grad()
        mse_loss(model(mine[2][0]), mine[2][1]).backward()
        if rank == 1:
            raise ValueError("boom")
        optimizer.step()

    results = on_replicas(3, body, steps=3, shard_state=1, run=outcomes)
    for rank in (0, 2):
        assert isinstance(results[rank], rc.PeerFailedError)
        assert "boom" in str(results[rank])


def test_a_rank_that_has_joined_has_nothing_to_give():
    def body(rank, model, optimizer, _):
        fit(model, optimizer, data(1, 1))
        if rank == 0:
            rc.join()
        else:
            fit(model, optimizer, data(1, 1))

    results = on_replicas(2, body, shard_state=1, run=outcomes)
    assert any("join()" in str(each) for each in results), results


def test_no_gradients_are_kept_but_those_of_the_buckets():
    """Buckets are made anew after the first step; where they are alike, shards are not."""

    def body(rank):
        model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30))
        optimizer = wrap(model, shard_state=1)
        first = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(2, 40)).sum().backward()
            buckets = optimizer._reducer.plan.ensure_buckets()
            first = first or [weakref.ref(each.buffer) for each in buckets]
            is_new = all(each.buffer is not ref() for each in buckets for ref in first)
            del buckets
            optimizer.step()
        gc.collect()
        return is_new, [ref() for ref in first]

    for is_new, kept in run_ranks(2, body):
        assert is_new
        assert kept == [None]
