"""broadcast_parameters, broadcast_optimizer_state, and torch tensors in the collectives."""

import copy
import time

import pytest
import torch
from harness import run_ranks
from loopback import LoopbackHub
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd


@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("what", ["state_dict", "named_parameters"])
def test_broadcast_parameters_copies_root_s_model(what, root):
    replicas = [nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)) for _ in range(3)]
    for rank, model in enumerate(replicas):
        model[1].num_batches_tracked.fill_(rank)
    expected = copy.deepcopy(replicas[root].state_dict())

    def body(rank):
        hvd.broadcast_parameters(getattr(replicas[rank], what)(), root_rank=root)

    run_ranks(3, body)
    for model in replicas:
        for name, value in model.state_dict().items():
            if what == "state_dict" or name in dict(model.named_parameters()):
                assert torch.equal(value, expected[name]), name


def test_a_tensor_of_no_dimension_stays_a_tensor():
    def body(rank):
        x = torch.tensor(rank + 0.5)
        for _ in range(4):
            for result in (rc.allreduce(x), rc.broadcast(x, 1), rc.allreduce_(x.clone())):
                assert torch.is_tensor(result)
                assert result.shape == ()
        return rc.allreduce(x).item(), rc.allreduce(x.item())

    assert run_ranks(2, body) == [(2.0, 2.0)] * 2


def test_broadcast_parameters_of_different_models_is_a_mismatch():
    def body(rank):
        with pytest.raises(rc.MismatchError, match=r"broadcast_\[weight\]"):
            hvd.broadcast_parameters(nn.Linear(3 + rank, 2).named_parameters())

    run_ranks(2, body)


def test_after_a_mismatch_the_other_tensors_are_whole_and_the_next_call_works():
    def body(rank):
        tensors = {name: torch.full((length,), float(rank)) for name, length in lengths(rank)}
        with pytest.raises(rc.MismatchError, match=r"broadcast_\[odd\]"):
            hvd.broadcast_parameters(tensors)
        assert not tensors["later"].any(), "the operation was left to itself"
        hvd.broadcast_parameters({"odd": tensors["later"].fill_(rank)})
        assert not tensors["later"].any()

    def lengths(rank):
        return ("first", 3), ("odd", 3 + rank), ("later", 5)

    run_ranks(2, body)


def test_more_tensors_than_go_at_once_are_all_sent():
    def body(rank):
        tensors = {str(i): torch.full((2,), float(i + rank)) for i in range(1500)}
        hvd.broadcast_parameters(tensors)
        assert all(tensor.eq(i).all() for i, tensor in enumerate(tensors.values()))

    run_ranks(2, body)


def trained(lr):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.5)
    for _ in range(2):
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_broadcast_optimizer_state_brings_state_and_settings_and_moves_no_weight():
    root_model, root_optimizer = trained(lr=0.125)
    fresh_model = nn.Linear(3, 2)
    fresh = torch.optim.AdamW(fresh_model.parameters(), lr=9.0, weight_decay=0.5)
    pairs = [(root_model, root_optimizer), (fresh_model, fresh), trained(lr=3.0)]
    weights = [[p.detach().clone() for p in model.parameters()] for model, _ in pairs]

    def body(rank):
        hvd.broadcast_optimizer_state(pairs[rank][1])

    expected = copy.deepcopy(root_optimizer.state_dict())
    run_ranks(3, body)
    for (model, optimizer), before in zip(pairs, weights, strict=True):
        state = optimizer.state_dict()
        assert state["param_groups"] == expected["param_groups"]
        for index, slots in expected["state"].items():
            for name, value in slots.items():
                assert torch.equal(state["state"][index][name], value)
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


class Wide(torch.optim.Optimizer):
    """Keeps a float32 sum of the gradients of each parameter, whatever its dtype is."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            total = self.state[p].setdefault("total", torch.zeros_like(p, dtype=torch.float32))
            p.sub_(total.add_(p.grad.float() / 3))


@pytest.mark.parametrize("make", [torch.optim.NAdam, torch.optim.ASGD, Wide])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_broadcast_optimizer_state_keeps_the_dtypes_of_the_state(make, dtype):
    def dtypes(optimizer):
        states = optimizer.state.values()
        return [{k: v.dtype for k, v in each.items() if torch.is_tensor(v)} for each in states]

    def body(rank):
        p = nn.Parameter(torch.ones(4, dtype=dtype))
        optimizer = make([p])
        p.grad = torch.full_like(p, 0.7)
        if rank == 1:
            optimizer.step()
        hvd.broadcast_parameters([p], root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        for _ in range(8):
            optimizer.step()
        return p.detach(), dtypes(optimizer)

    (loaded, theirs), (expected, of_root) = run_ranks(2, body)
    assert theirs == of_root
    assert torch.equal(loaded, expected)


def test_broadcast_optimizer_state_keeps_the_dtypes_of_lists_of_tensors():
    def body(rank):
        params = [nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.bfloat16, None)]
        lbfgs = torch.optim.LBFGS(params, max_iter=3)

        def closure():
            lbfgs.zero_grad()
            loss = sum(((p.float() - 3) ** 4).sum() for p in params)
            loss.backward()
            return loss

        if rank == 0:
            lbfgs.step(closure)
        hvd.broadcast_optimizer_state(lbfgs, root_rank=0)
        return [each.dtype for each in lbfgs.state[params[0]]["old_dirs"]]

    loaded, of_root = run_ranks(2, body)
    assert loaded == of_root == [torch.float32]


class CountsInInts(torch.optim.Adam):
    """Has steps that are int, as Adam's were once, whose __setstate__() makes tensors of them."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p]["step"] = 5


class WithFormat(torch.optim.SGD):
    """Has a state_dict() of its own format."""

    def state_dict(self):
        return {"inner": super().state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state["inner"])


@pytest.mark.parametrize("make", [CountsInInts, WithFormat])
def test_broadcast_optimizer_state_takes_what_the_optimizer_makes_of_it(make):
    def body(rank):
        p = nn.Parameter(torch.ones(2))
        optimizer = make([p], lr=0.1 if rank == 0 else 0.2)
        if rank == 0:
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return optimizer.param_groups[0]["lr"], float(optimizer.state[p].get("step", 0))

    first, second = run_ranks(2, body)
    assert first == second


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.SparseAdam])
def test_broadcast_optimizer_state_leaves_zero_gradients_where_there_was_no_state(kind):
    models = [nn.Embedding(7, 3, sparse=kind is torch.optim.SparseAdam) for _ in range(2)]
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def body(rank):
        weight = models[rank].weight
        optimizer = hvd.DistributedOptimizer(kind([weight, frozen], lr=0.5))
        for is_first in (True, False):
            hvd.broadcast_optimizer_state(optimizer)
            if is_first:
                assert frozen.grad is None
                assert weight.grad.shape == weight.shape
                assert not weight.grad.to_dense().any()
            before = hvd.broadcast(weight.detach(), 0)
            models[rank](torch.tensor([rank, 5])).sum().backward()
            optimizer.step()
            moved = (weight.detach() - before).any(1).nonzero().flatten().tolist()
            assert moved == [0, 1, 5]
            optimizer.zero_grad()

    run_ranks(2, body)


def test_a_weight_without_a_gradient_is_alike_behind_the_state_of_a_checkpoint():
    """Only root has one, as where it alone loads a checkpoint; zeros would let weights decay."""

    def body(rank):
        used, unused = (nn.Parameter(torch.ones(3)) for _ in range(2))
        optimizer = torch.optim.SGD([used, unused], lr=0.5, momentum=0.9, weight_decay=0.1)
        if rank == 1:
            used.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        named = [("used", used), ("unused", unused)]
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named)
        hvd.broadcast_parameters(dict(named), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        used.sum().backward()
        optimizer.step()
        return used.tolist(), unused.tolist()

    first, second = run_ranks(2, body)
    assert first == second


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4)])
def test_torch_tensors_come_back_as_torch_tensors(dtype, shape):
    kind = getattr(torch, dtype)

    def body(rank):
        x = torch.full(shape, rank + 1, dtype=kind)
        total = rc.allreduce(x)
        assert (x == rank + 1).all()
        assert (total.dtype, tuple(total.shape)) == (kind, shape)
        assert (total == 6).all()
        assert rc.allreduce_(x) is x
        assert (x == 6).all()

    run_ranks(3, body)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "complex64", "complex128", "uint16"])
def test_any_tensor_can_be_moved(dtype):
    def body(rank):
        x = torch.tensor([rank, 1, 0]).to(getattr(torch, dtype))
        root = rc.broadcast(x, 1)
        assert root.tolist() == torch.tensor([1, 1, 0]).to(x.dtype).tolist()
        assert rc.allgather(x).tolist()[3 * rank : 3 * rank + 3] == x.tolist()

    run_ranks(3, body)


def test_strided_conjugated_negated_and_differentiable_tensors():
    def body(rank):
        x = (torch.arange(12.0).reshape(3, 4) + rank).requires_grad_()
        total = rc.allreduce(x.t())
        assert not total.requires_grad
        assert torch.equal(total, 2 * torch.arange(12.0).reshape(3, 4).t() + 1)
        z = torch.tensor([1 + 2j]).conj()
        assert rc.broadcast(z).tolist() == [1 - 2j]
        assert z.imag.is_neg()
        assert rc.broadcast(z.imag).tolist() == [-2.0]
        assert rc.allgather(z.imag).tolist() == [-2.0, -2.0]
        assert rc.allreduce_(z.imag).tolist() == [-4.0]
        assert z.tolist() == [1 - 4j]
        y = torch.zeros(4, 4)
        rc.allreduce_(y[:, ::2].fill_(1))
        assert y[:, ::2].eq(2).all()
        assert y[:, 1::2].eq(0).all()

    run_ranks(2, body)


def test_tensors_of_no_or_one_element_work_whatever_their_strides():
    import numpy as np

    def body(rank):
        one = torch.arange(10.0)[::3][:1] + 1
        assert rc.allgather(torch.arange(10.0)[::3][:1]).tolist() == [0.0, 0.0]
        assert rc.allreduce_(one).tolist() == [2.0]
        assert rc.allreduce_(torch.from_numpy(np.empty(0))).numel() == 0
        assert rc.allgather(torch.from_numpy(np.empty((0, 3)))).shape == (0, 3)

    run_ranks(2, body)


def test_autograd_learns_of_a_value_that_was_changed_in_place():
    def body(rank):
        w = torch.ones(3, requires_grad=True)
        h = w * 2
        y = h * h
        rc.allreduce_(h)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(2, device="meta"), "on meta"),
        (lambda: torch.ones(2, 2).to_sparse(), "to_dense"),
        (lambda: torch.ones(2).expand(3, 2), "overlap"),
    ],
)
def test_tensors_that_cannot_be_reduced_say_why(make, message):
    def body(rank):
        with pytest.raises((TypeError, ValueError), match=message):
            rc.allreduce_(make())

    run_ranks(2, body)


def test_numpy_and_torch_may_meet():
    import numpy as np

    def body(rank):
        x = np.ones(3, np.float32) if rank else torch.ones(3)
        return type(rc.allreduce(x))

    assert run_ranks(2, body) == [torch.Tensor, np.ndarray]


@pytest.mark.parametrize("shard_state", [0, 1])
def test_broadcast_optimizer_state_says_which_ranks_are_in_join(shard_state):
    models = [torch.nn.Linear(2, 2) for _ in range(2)]

    def body(rank):
        optimizer = torch.optim.Adam(models[rank].parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, shard_state=shard_state, sync_weights=False)
        hvd.barrier()
        if rank == 0:
            with pytest.raises(rc.MismatchError, match=r"ranks \[1\] are in join\(\)"):
                hvd.broadcast_optimizer_state(optimizer)
        hvd.join()

    run_ranks(2, body)


def test_autograd_hears_of_a_reduction_whether_or_not_a_rank_is_late():
    def body(rank):
        x = torch.ones(3)
        rc.allreduce_(x)  # from now on the way is known
        for is_late in (False, True):
            before = x._version
            if is_late and rank == 1:
                time.sleep(0.05)  # longer than who waits in C++ does
            rc.allreduce_(x)
            assert x._version > before

    run_ranks(2, body, hub=LoopbackHub(2, (0, 0)))


def test_rooted_and_grouped_collectives_return_torch_tensors():
    def body(rank):
        x = torch.full((4, 2), float(rank), dtype=torch.bfloat16)
        total = rc.grouped_allreduce([x])[0]
        rows = rc.scatter(x if rank == 1 else None, root=1)
        gathered = rc.gather(x)
        mixed = rc.alltoall(x)
        view = rc.reduce_scatter_(x.clone())
        kept = rc.reduce_(x.clone(), root=0)
        return total, rows, gathered, mixed, view, kept

    for rank, (total, rows, gathered, mixed, view, kept) in enumerate(run_ranks(2, body)):
        assert (total == 1).all()
        assert rows.shape == (2, 2)
        assert (rows == 1).all()
        assert gathered.shape == (8, 2) if rank == 0 else gathered is None
        assert mixed[:, 0].tolist() == [0, 0, 1, 1]
        assert (view == 1).all()
        assert (kept == 1).all()
        assert all(each.dtype == torch.bfloat16 for each in (total, rows, mixed, view, kept))
