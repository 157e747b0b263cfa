"""DistributedOptimizer against one process on the whole batch; ranks are threads."""

import copy

import pytest

torch = pytest.importorskip("torch")

from harness import outcomes, run_ranks  # noqa: E402
from torch import nn  # noqa: E402

import ringcomm as rc  # noqa: E402
import ringcomm.torch as hvd  # noqa: E402
from ringcomm.config import Settings  # noqa: E402
from ringcomm.torch.buckets import plan_buckets  # noqa: E402

torch.set_num_threads(1)
BATCH = 6
OPTIMIZERS = {
    "SGD with momentum": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 1e-12),
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3), 1e-10),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01), 1e-10),
}


def network(dtype=torch.float64):
    torch.random.default_generator.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3)).to(dtype)


# Threads share torch's generator: models are built before the ranks start.
def models(size, **kwargs):
    first = network(**kwargs)
    return [copy.deepcopy(first) for _ in range(size)]


def data(steps, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, size * BATCH, 5, generator=generator, dtype=dtype)
    y = torch.randn(steps, size * BATCH, 3, generator=generator, dtype=dtype)
    return x, y


def train(model, optimizer, batches, scheduler=None):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return [p.detach().clone() for p in model.parameters()]


def share(x, y, rank, size):
    return [(a.chunk(size)[rank], b.chunk(size)[rank]) for a, b in zip(x, y, strict=True)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_n_ranks_with_batch_b_equal_one_process_with_batch_nb_over_200_steps(name, size):
    make, tolerance = OPTIMIZERS[name]
    x, y = data(200, size)
    alone, *replicas = models(size + 1)
    expected = train(alone, make(alone.parameters()), zip(x, y, strict=True))

    def body(rank):
        model = replicas[rank]
        optimizer = make(model.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return train(model, optimizer, share(x, y, rank, size))

    results = run_ranks(size, body, settings=Settings(fusion_mib=0.001))
    for index, want in enumerate(expected):
        for got in results:
            assert torch.equal(got[index], results[0][index])  # the same bits on every rank
            assert (got[index] - want).abs().max() <= tolerance * want.abs().max()


def test_a_wrong_gradient_would_be_seen():
    """The oracle itself: without the reduction the replicas drift apart far beyond tolerance."""
    x, y = data(20, 2)
    one, two = models(2)
    make, tolerance = OPTIMIZERS["Adam"]
    a = train(one, make(one.parameters()), share(x, y, 0, 2))
    b = train(two, make(two.parameters()), share(x, y, 1, 2))
    assert (a[0] - b[0]).abs().max() > 1e6 * tolerance * a[0].abs().max()


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.filterwarnings("error")
def test_schedulers_work_whether_made_before_or_after_wrapping(is_early):
    x, y = data(30, 2)
    alone, *replicas = models(3)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 7, gamma=0.5)

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = train(alone, reference, zip(x, y, strict=True), schedule(reference))

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedule(optimizer) if is_early else None
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        scheduler = scheduler or schedule(wrapped)
        result = train(model, wrapped, share(x, y, rank, 2), scheduler)
        assert wrapped.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        return result

    for result in run_ranks(2, body):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(result, expected, strict=True))


def test_it_is_an_optimizer_of_its_own_class_and_shares_state():
    (model,) = models(1)

    def body(rank):
        optimizer = torch.optim.Adam(model.parameters())
        train(model, optimizer, zip(*data(2, 1), strict=True))
        before = optimizer.state_dict()
        wrapped = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        assert isinstance(wrapped, torch.optim.Adam)
        assert type(wrapped).__name__ == "Adam"
        assert wrapped.state_dict().keys() == before.keys()
        assert wrapped.state_dict()["state"][0]["step"] == 2
        train(model, wrapped, zip(*data(3, 1), strict=True))
        assert optimizer.state_dict()["state"][0]["step"] == 5
        saved = copy.deepcopy(wrapped.state_dict())
        wrapped.load_state_dict(saved)
        assert wrapped.state_dict()["state"][0]["step"] == 5

    run_ranks(1, body)


def test_state_dict_round_trip_continues_the_same_training():
    x, y = data(20, 2)
    alone, *replicas = models(3)
    expected = train(alone, torch.optim.Adam(alone.parameters()), zip(x, y, strict=True))

    def body(rank):
        model = replicas[rank]
        batches = share(x, y, rank, 2)
        first = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters()
        )
        train(model, first, batches[:10])
        saved = copy.deepcopy(first.state_dict())
        first._reducer.close()
        second = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters(), lr=9), model.named_parameters()
        )
        second.load_state_dict(saved)
        return train(model, second, batches[10:])

    for result in run_ranks(2, body):
        assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(result, expected, strict=True))


def test_grad_is_final_when_backward_returns_and_clipping_sees_it():
    x, y = data(10, 2)
    alone, *replicas = models(3)

    def clipped(model, optimizer, batches):
        norms = []
        for a, b in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
        return norms

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = clipped(alone, reference, zip(x, y, strict=True))

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return clipped(model, optimizer, share(x, y, rank, 2))

    for norms in run_ranks(2, body):
        assert norms == pytest.approx(expected, rel=1e-12)


def test_sum_adds_gradients_up():
    replicas = models(2)
    x, y = data(1, 2)

    def body(rank):
        model = replicas[rank]
        single = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Sum)
        a, b = share(x, y, rank, 2)[0]
        nn.functional.mse_loss(model(a), b).backward()
        nn.functional.mse_loss(single(a), b).backward()
        total = rc.allreduce(single[0].weight.grad)
        assert torch.allclose(model[0].weight.grad, total, rtol=1e-12)

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_reduce_to_the_same_bits_everywhere(dtype):
    replicas = models(3, dtype=dtype)
    x, y = data(3, 3, dtype)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return train(model, optimizer, share(x, y, rank, 3))

    first, *others = run_ranks(3, body)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_frozen_and_nowhere_used_parameters_keep_no_gradient():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(2, 2) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.frozen(self.used(x))

    first = Net()
    replicas = [copy.deepcopy(first) for _ in range(2)]

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        before = model.unused.weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            optimizer.step()
        assert model.unused.weight.grad is None
        assert model.frozen.weight.grad is None
        assert torch.equal(model.unused.weight, before)
        return model.used.weight.detach()

    one, two = run_ranks(2, body)
    assert torch.equal(one, two)
    assert not torch.equal(one, first.used.weight)


def test_used_on_some_ranks_only_is_one_error_everywhere_and_the_engine_works_on():
    replicas = models(3)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        part = model[:2] if rank == 1 else model
        with pytest.raises(rc.MismatchError) as caught:
            part(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.zero_grad()
        model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        return str(caught.value)

    texts = run_ranks(3, body)
    assert len(set(texts)) == 1
    assert "2.weight (on 2 of 3), 2.bias (on 2 of 3), 3.weight" in texts[0]


def test_a_rank_without_any_backward_is_noticed_at_step():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loss = model(torch.ones(1, 5, dtype=torch.float64)).sum()
        with pytest.raises(rc.MismatchError, match=r"0.weight \(on 1 of 2\)"):
            loss.backward() if rank == 0 else optimizer.step()

    run_ranks(2, body)


def test_a_second_backward_before_step_is_one_clear_error():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        x = torch.ones(1, 5, dtype=torch.float64)
        model(x).sum().backward()
        with pytest.raises(rc.RingcommError, match=r"one backward\(\) per step\(\)"):
            model(x).sum().backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        model.zero_grad()  # not ours, but the gradients are new ones all the same
        model(x).sum().backward()
        model.zero_grad()
        model(x).sum().backward()
        return float(model[0].weight.grad.sum())

    one, two = run_ranks(2, body)
    assert one == two


def test_a_backward_that_raises_does_not_spoil_the_next():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        x = torch.full((1, 5), rank + 1.0, dtype=torch.float64)
        hidden = model[0](x)
        hidden.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[3](model[2](model[1](hidden))).sum().backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        return model[0].weight.grad.clone()

    one, two = run_ranks(2, body)
    assert torch.equal(one, two)


def test_reentrant_checkpointing_reduces_every_gradient_once():
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(5, 5).double() for _ in range(3))

        def forward(self, x):
            return self.c(checkpoint(self.b, self.a(x), use_reentrant=True))

    first = Net()
    replicas = [copy.deepcopy(first) for _ in range(2)]
    x, _ = data(1, 2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        model(x[0].chunk(2)[rank]).pow(2).mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    one, two = run_ranks(2, body)
    first(x[0]).pow(2).mean().backward()
    for a, b, p in zip(one, two, first.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.allclose(a, p.grad, rtol=1e-10)


def test_step_after_a_failed_reduction_is_refused_until_zero_grad():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        loss = (model if rank else model[:2])(torch.ones(1, 5, dtype=torch.float64)).sum()
        with pytest.raises(rc.MismatchError):
            loss.backward()
        with pytest.raises(rc.RingcommError, match="zero_grad"):
            optimizer.step()

    run_ranks(2, body)


def test_a_parameter_unfrozen_after_wrapping_is_refused():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        model[0].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        model[0].weight.requires_grad_(True)
        model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()
        with pytest.raises(rc.RingcommError, match=r"shape \(16, 5\) .*requires_grad=False"):
            optimizer.step()

    run_ranks(2, body)


def test_step_hooks_run_once():
    (model,) = models(1)

    def body(rank):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        calls = []
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
        train(model, optimizer, zip(*data(1, 1), strict=True))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train(model, optimizer, zip(*data(1, 1), strict=True))
        return len(calls)

    assert run_ranks(1, body) == [2]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_stays_within_ten_times_the_spread_of_reordered_sums(name):
    """Two right answers in float32 differ by rounding: by how much, permuted batches tell."""
    make, _ = OPTIMIZERS[name]
    x, y = data(100, 2, torch.float32)
    *alone, one, two = models(5, dtype=torch.float32)
    orders = [
        torch.randperm(2 * BATCH, generator=torch.Generator().manual_seed(s)) for s in range(3)
    ]
    runs = [
        train(model, make(model.parameters()), zip(x[:, order], y[:, order], strict=True))
        for model, order in zip(alone, orders, strict=True)
    ]

    def body(rank):
        model = (one, two)[rank]
        optimizer = make(model.parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return train(model, optimizer, share(x, y, rank, 2))

    result, _ = run_ranks(2, body)
    for index, got in enumerate(result):
        spread = max(float((a[index] - b[index]).abs().max()) for a in runs for b in runs)
        assert float((got - runs[0][index]).abs().max()) <= 10 * spread


def test_closures_work():
    x, y = data(8, 2)
    alone, *replicas = models(3)

    def closures(model, optimizer, batches):
        for a, b in batches:

            def closure(a=a, b=b):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(a), b)
                loss.backward()
                return loss

            optimizer.step(closure)
        return [p.detach().clone() for p in model.parameters()]

    reference = torch.optim.SGD(alone.parameters(), lr=0.1)
    expected = closures(alone, reference, zip(x, y, strict=True))

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        return closures(model, optimizer, share(x, y, rank, 2))

    for result in run_ranks(2, body):
        assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(result, expected, strict=True))


def test_parameters_added_later_are_reduced():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        optimizer.add_param_group({"params": list(model[2:].parameters()), "lr": 0.01})
        model(torch.full((1, 5), rank + 1.0, dtype=torch.float64)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    one, two = run_ranks(2, body)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_channels_last_gradients_keep_their_layout():
    first = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    replicas = [copy.deepcopy(first) for _ in range(2)]
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        model(x[rank : rank + 1].to(memory_format=torch.channels_last)).mean().backward()
        return model.weight.grad

    one, two = run_ranks(2, body)
    (first(x).mean()).backward()
    assert torch.equal(one, two)
    assert torch.allclose(one, first.weight.grad, rtol=1e-4, atol=1e-7)


def test_the_step_is_on_the_status_page():
    class Page:
        steps = ()

        def set_step(self, step):
            self.steps += (step,)

        def begin_op(self, *_):
            return

        end_op = begin_op

    page = Page()
    (model,) = models(1)

    def body(rank):
        from ringcomm.engine.world import engine

        engine()._page = page
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        train(model, optimizer, zip(*data(3, 1), strict=True))

    run_ranks(1, body)
    assert page.steps == (1, 2, 3)


@pytest.mark.parametrize(
    ("named", "error", "message"),
    [
        ([], ValueError, "6 of the optimizer's 6 parameters are not in named_parameters"),
        ("twice", ValueError, "not unique: 0.weight"),
        ("meta", TypeError, "is on meta"),
        ("or", TypeError, r"^DistributedOptimizer: 0.weight: BOR of float64 has no meaning"),
    ],
)
def test_what_cannot_be_wrapped_is_refused(named, error, message):
    (model,) = models(1)
    if named == "twice":
        named = [("0.weight", p) for p in model.parameters()]
    elif named == "meta":
        model, named = nn.Linear(2, 2, device="meta"), None
    op = rc.AVERAGE
    if named == "or":
        named, op = list(model.named_parameters()), rc.BOR

    def body(rank):
        with pytest.raises(error, match=message):
            hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1), named, op=op)

    run_ranks(1, body)


def test_complex_parameters_are_averaged():
    gradients = torch.tensor([[1 + 2j, -3j], [5 + 0j, 1 + 1j]])

    def body(rank):
        parameter = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1))
        (parameter * gradients[rank].conj()).real.sum().backward()
        optimizer.step()
        return parameter.detach()

    for parameter in run_ranks(2, body):
        assert torch.equal(parameter, -gradients.mean(0))


def test_wrapping_twice_pickling_and_copying_are_refused():
    import pickle

    (model,) = models(1)

    def body(rank):
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1))
        with pytest.raises(ValueError, match="already"):
            hvd.DistributedOptimizer(wrapped)
        for copier in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="state_dict"):
                copier(wrapped)

    run_ranks(1, body)


def test_sparse_gradients_are_refused_by_name():
    model = nn.Embedding(4, 2, sparse=True)

    def body(rank):
        hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1), model.named_parameters()
        )
        with pytest.raises(TypeError, match="gradient of weight is sparse"):
            model(torch.tensor([1])).sum().backward()

    run_ranks(1, body)


def test_before_init_wrapping_says_so():
    model = nn.Linear(1, 1)
    with pytest.raises(rc.NotInitializedError, match="init"):
        hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1))


def test_a_dead_rank_ends_backward_with_its_reason():
    replicas = models(2)

    def body(rank):
        model = replicas[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        if rank == 1:
            raise ValueError("boom")
        model(torch.ones(1, 5, dtype=torch.float64)).sum().backward()

    error = outcomes(2, body)[0]
    assert isinstance(error, rc.PeerFailedError)
    assert "boom" in str(error)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ([], 10, []),
        ([(4, "a")], 10, [[0]]),
        ([(4, "a"), (4, "a"), (4, "a")], 8, [[2, 1], [0]]),
        ([(40, "a"), (4, "a")], 8, [[1], [0]]),
        ([(4, "a"), (4, "b"), (4, "a")], 8, [[2, 0], [1]]),
    ],
)
def test_buckets_go_from_the_last_parameter_and_never_mix_dtypes(sizes, limit, expected):
    assert plan_buckets(sizes, limit) == expected
