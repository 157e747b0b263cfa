"""SyncBatchNorm: ranks with a part of a batch each equal torch's BatchNorm with all of it."""

import copy
import pickle

import pytest
import torch
from harness import errors_of_ranks, run_ranks
from torch import nn
from torch.nn.functional import mse_loss
from training_models import assert_close, assert_equals_one_process, copies, seeded, wrap

import ringcomm as rc
import ringcomm.torch as hvd

KINDS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
SHAPES = {0: (), 1: (7,), 2: (4, 5), 3: (2, 3, 4)}
PARTS = {1: (6,), 2: (4, 4), 3: (5, 0, 3), 4: (1, 6, 2, 3)}
SIZES = pytest.mark.parametrize("size", PARTS)


def random(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def with_values(layer):
    """Give weight and bias other values than 1 and 0."""
    for seed, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=10 + seed) + 2)
    return layer


def backward(layer, x, pull):
    """Return output, gradients of input and parameters, and buffers."""
    x = x.detach().requires_grad_()
    y = layer(x)
    (y * pull).sum().backward()
    return y.detach(), x.grad, [p.grad for p in layer.parameters()], list(layer.buffers())


def assert_near(got, want, bound=1e-12):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    assert got.numel() == 0 or (got - want).abs().max() <= bound * max(want.abs().max(), 1)


@SIZES
@pytest.mark.parametrize("spatial", KINDS)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("affine", [True, False])
def test_output_gradients_and_running_statistics_equal_one_process(size, spatial, momentum, affine):
    n = sum(PARTS[size])
    options = {"momentum": momentum, "affine": affine, "eps": 1e-3, "dtype": torch.float64}
    xs = [random(n, 3, *SHAPES[spatial], seed=s) * 3 + 5 for s in range(2)]
    pulls = [random(n, 3, *SHAPES[spatial], seed=5 + s) for s in range(2)]
    alone = with_values(KINDS[spatial](3, **options))
    layers = [with_values(hvd.SyncBatchNorm(3, **options)) for _ in range(size)]

    def body(rank):
        return [
            backward(layers[rank], x.split(PARTS[size])[rank], pull.split(PARTS[size])[rank])
            for x, pull in zip(xs, pulls, strict=True)
        ][-1]

    results = run_ranks(size, body)
    want = [backward(alone, x, pull) for x, pull in zip(xs, pulls, strict=True)][-1]
    assert_near(torch.cat([r[0] for r in results]), want[0])
    assert_near(torch.cat([r[1] for r in results]), want[1])
    for index, gradient in enumerate(want[2]):
        assert_near(sum(r[2][index] for r in results), gradient)
    for result in results:
        for got, first, buffer in zip(result[3], results[0][3], want[3], strict=True):
            assert torch.equal(got, first)
            assert_near(got, buffer)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 2)
        self.norm, self.last = nn.BatchNorm2d(4), nn.BatchNorm2d(3, affine=False)

    def forward(self, x):
        return self.last(self.b(torch.tanh(self.norm(self.a(x))))).flatten(1)


def images(size, n_samples):
    x, y = random(6, n_samples, 2, 5, 5, seed=3), random(6, n_samples, 12, seed=4)
    return list(zip(x, y, strict=True))


@SIZES
@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("is_weighed", [True, False])
def test_training_equals_one_process(size, is_weighed):
    """With set_samples() batches may be unequal: their cross terms are weighed, too."""
    parts = PARTS[size] if is_weighed else (4,) * size

    def train(model, optimizer, batches):
        if isinstance(optimizer, torch.optim.SGD) and hasattr(optimizer, "set_samples"):
            model = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
        for x, y in batches:
            if is_weighed and hasattr(optimizer, "set_samples"):
                optimizer.set_samples(len(x))
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()

    assert_equals_one_process(
        size,
        train,
        model=seeded(lambda: Net().double()),
        batches=images(size, sum(parts)),
        split=lambda batches, rank, _: [
            tuple(part.split(parts)[rank] for part in batch) for batch in batches
        ],
        tolerance=1e-11,
    )


class Plain(nn.BatchNorm2d):
    """Of plain operations: the third derivative of torch's own takes the mean for a constant."""

    def forward(self, x):
        deviation = x - x.mean((0, 2, 3), keepdim=True)
        y = deviation * (deviation.square().mean((0, 2, 3), keepdim=True) + self.eps).rsqrt()
        return y * self.weight.view(-1, 1, 1) + self.bias.view(-1, 1, 1) if self.affine else y


def second_order(layer, x, pull, push, scale=1.0):
    """Return gradients of a penalty on gradients, by all that it depends on; and one of those."""
    x, pull = x.detach().requires_grad_(), pull.detach().requires_grad_()
    inputs = [x, *layer.parameters()]
    first = torch.autograd.grad((torch.sin(layer(x)) * pull).sum(), inputs, create_graph=True)
    penalty = (first[0] * push).sum() + first[0].square().sum() * scale
    second = torch.autograd.grad(penalty, [x, pull, *layer.parameters()], create_graph=True)
    third = torch.autograd.grad((second[0].square() * push).sum() * scale, x)
    return [each.detach() for each in (*second[:2], *third)], [p.detach() for p in second[2:]]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("affine", [True, False])
def test_gradients_of_gradients_equal_one_process(size, affine):
    n, shape = sum(PARTS[size]), SHAPES[2]
    x, pull, push = (random(n, 3, *shape, seed=s) for s in range(3))
    options = {"affine": affine, "eps": 1e-3, "dtype": torch.float64}
    layers = [with_values(hvd.SyncBatchNorm(3, **options)) for _ in range(size)]

    def body(rank):
        parts = [each.split(PARTS[size])[rank] for each in (x * 3 + 50, pull, push)]
        return second_order(layers[rank], *parts)

    results = run_ranks(size, body)
    rows, parameters = second_order(with_values(Plain(3, **options)), x * 3 + 50, pull, push)
    for index, want in enumerate(rows):
        assert_near(torch.cat([r[0][index] for r in results]), want, 1e-11)
    for index, want in enumerate(parameters):
        assert_near(sum(r[1][index] for r in results), want, 1e-11)


@pytest.mark.parametrize("rows", [(1, 5), (0, 6)])
def test_gradients_of_gradients_are_weighed_as_gradients_are(rows):
    x, pull, push = (random(6, 3, seed=s) for s in range(3))

    def gradient(layer, x, pull, push):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad((layer(x) * pull).sum(1).mean(), x, create_graph=True)
        return torch.autograd.grad((dx * push).sum(1).mean(), x)[0]

    layers = [hvd.SyncBatchNorm(3, dtype=torch.float64) for _ in rows]

    def body(rank):
        optimizer = wrap(layers[rank])
        optimizer.set_samples(rows[rank])
        # Each gradient is that of the mean over all, divided by this rank's share of it.
        share = rows[rank] / 6
        parts = [each.split(rows)[rank] for each in (x, pull, push * share)]
        return gradient(layers[rank], *parts).nan_to_num() * share

    want = gradient(nn.BatchNorm1d(3, dtype=torch.float64), x, pull, push)
    assert_near(torch.cat(run_ranks(2, body)), want)


def test_the_weight_of_a_step_is_forgotten_after_it():
    xs = [random(4, 3, seed=s) for s in range(2)]
    pull = random(4, 3, seed=9)
    want = backward(nn.BatchNorm1d(3, dtype=torch.float64), xs[1], pull)[1]
    layers = [hvd.SyncBatchNorm(3, dtype=torch.float64) for _ in range(2)]

    def body(rank):
        optimizer = wrap(layers[rank])
        optimizer.set_samples(1 + 2 * rank)
        layers[rank](xs[0].split((1, 3))[rank]).sum().backward()
        optimizer.step()
        layers[rank] = hvd.SyncBatchNorm(3, dtype=torch.float64)
        return backward(layers[rank], xs[1].split((1, 3))[rank], pull.split((1, 3))[rank])[1]

    assert_near(torch.cat(run_ranks(2, body)), want)


def test_a_large_mean_does_not_cancel_the_variance():
    x = random(400, 1, dtype=torch.float64).float() + 1e4
    layers = [hvd.SyncBatchNorm(1, eps=0, momentum=1.0) for _ in range(2)]

    def body(rank):
        layers[rank](x.chunk(2)[rank])
        return layers[rank].running_var

    for variance in run_ranks(2, body):
        assert abs(variance / x.double().var(0) - 1) < 1e-3  # one pass: 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_float_parameters", [True, False])
def test_16_bit_inputs_have_statistics_in_float32(dtype, has_float_parameters):
    x = random(4096, 2, seed=1, dtype=dtype)
    pull = random(4096, 2, seed=2, dtype=dtype)
    layers = [
        hvd.SyncBatchNorm(2).to(torch.float32 if has_float_parameters else dtype) for _ in "ab"
    ]
    y, dx, _, _ = backward(nn.BatchNorm1d(2).double(), x.double(), pull.double())
    step = torch.finfo(dtype).eps

    def body(rank):
        return backward(layers[rank], x.chunk(2)[rank], pull.chunk(2)[rank])

    results = run_ranks(2, body)
    assert_near(torch.cat([r[0] for r in results]).double(), y, 2 * step)
    assert_near(torch.cat([r[1] for r in results]).double(), dx, 2 * step)
    assert all(r[0].dtype == r[1].dtype == dtype for r in results)


def test_channels_last_stays():
    x = random(4, 3, 5, 6).to(memory_format=torch.channels_last)
    layers = [hvd.SyncBatchNorm(3, dtype=torch.float64) for _ in range(2)]

    def body(rank):
        y, dx, _, _ = backward(layers[rank], x.chunk(2)[rank], torch.ones(()))
        return [z.is_contiguous(memory_format=torch.channels_last) for z in (y, dx)]

    assert run_ranks(2, body) == [[True, True]] * 2


@pytest.mark.parametrize("tracks", [True, False])
def test_eval_sends_nothing(tracks):
    """Neither rank waits for the other: each calls it another number of times."""
    layers = [hvd.SyncBatchNorm(3, track_running_stats=tracks).eval() for _ in range(2)]
    plain = nn.BatchNorm1d(3, track_running_stats=tracks).eval()
    x = random(4, 3, dtype=torch.float32)

    def body(rank):
        outputs = [layers[rank](x) for _ in range(rank)]
        rc.barrier()
        return outputs

    (_, (output,)) = run_ranks(2, body)
    assert torch.equal(output, plain(x))


def test_without_running_statistics_training_uses_the_batch_of_all():
    x = random(6, 3)
    layers = [hvd.SyncBatchNorm(3, track_running_stats=False, dtype=x.dtype) for _ in range(2)]
    want = nn.BatchNorm1d(3, track_running_stats=False, dtype=x.dtype)(x)
    assert_near(torch.cat(run_ranks(2, lambda rank: layers[rank](x.split((1, 5))[rank]))), want)


@pytest.mark.parametrize("is_set", [True, False])
def test_a_process_set_shares_statistics_among_its_ranks_alone(is_set):
    class ProcessSet:
        def __init__(self, group):
            self.group = group

    x = random(8, 3)
    wants = [nn.BatchNorm1d(3, dtype=x.dtype)(part) for part in (x[0::2], x[1::2])]

    def body(rank):
        group = rc.Group(range(rank % 2, 4, 2))
        layer = hvd.SyncBatchNorm(
            3, process_set=ProcessSet(group) if is_set else group, dtype=x.dtype
        )
        return layer(x[rank % 2 :: 2].chunk(2)[rank // 2])

    results = run_ranks(4, body)
    for parity in range(2):
        assert_near(torch.cat(results[parity::2]), wants[parity])


@pytest.mark.parametrize("rows", [(1, 0), (0, 0)])
def test_fewer_than_two_values_are_refused_on_every_rank(rows):
    layers = [hvd.SyncBatchNorm(3) for _ in rows]
    errors = errors_of_ranks(2, lambda rank: layers[rank](torch.ones(rows[rank], 3)))
    for error in errors:
        assert isinstance(error, ValueError)
        assert f"2 ranks together have {sum(rows)}" in str(error)


@pytest.mark.parametrize(
    ("shape", "message"), [((4,), "1 dimension"), ((4, 2), "2 channels, the layer 3")]
)
def test_an_input_that_does_not_fit_is_refused_before_anything_is_sent(shape, message):
    def body(rank):
        with pytest.raises(ValueError, match=message):
            hvd.SyncBatchNorm(3)(torch.ones(shape))

    run_ranks(1, body)


def test_what_is_no_process_set_is_refused():
    with pytest.raises(TypeError, match="process_set is a ProcessSet"):
        hvd.SyncBatchNorm(3, process_set=[0, 1])


def test_before_init_training_says_so_and_eval_works():
    layer = hvd.SyncBatchNorm(3)
    with pytest.raises(rc.NotInitializedError, match="init"):
        layer(torch.ones(4, 3))
    layer.eval()(torch.ones(4, 3))


# --- a BatchNorm like torch's -------------------------------------------------------------------
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_it_is_a_batch_norm_with_its_state_dict(copied):
    layer = copied(with_values(hvd.SyncBatchNorm(3, momentum=None)))
    plain = nn.BatchNorm1d(3)
    plain.load_state_dict(layer.state_dict())
    layer.load_state_dict(plain.state_dict())
    assert isinstance(layer, nn.modules.batchnorm._BatchNorm)
    assert repr(layer).startswith("SyncBatchNorm(3, eps=1e-05, momentum=None")


def test_conversion_keeps_parameters_hooks_mode_and_sharing():
    shared = nn.BatchNorm1d(3)
    calls = []
    shared.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(nn.Linear(3, 3), shared, nn.ModuleList([shared]), nn.InstanceNorm1d(3))
    model.empty = None
    model.register_module("none", None)
    shared.eval()
    parameters, buffers = list(model.parameters()), list(model.buffers())
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)
    assert converted is model
    assert model[1] is model[2][0]
    assert type(model[1]) is hvd.SyncBatchNorm
    assert type(model[3]) is nn.InstanceNorm1d
    assert not model[1].training
    assert all(p is q for p, q in zip(parameters, model.parameters(), strict=True))
    assert all(p is q for p, q in zip(buffers, model.buffers(), strict=True))
    model[1](torch.ones(2, 3))
    assert calls == [1]
    assert type(shared) is nn.BatchNorm1d


def test_a_batch_norm_itself_is_replaced():
    plain = nn.BatchNorm2d(4, eps=0.5, momentum=None, affine=False)
    made = hvd.SyncBatchNorm.convert_sync_batchnorm(plain)
    assert (made.num_features, made.eps, made.momentum, made.affine) == (4, 0.5, None, False)
    assert made.running_mean is plain.running_mean


def test_a_lazy_batch_norm_is_converted_after_its_first_batch_only():
    lazy = nn.LazyBatchNorm1d()
    with pytest.raises(ValueError, match="run a batch through the model first"):
        hvd.SyncBatchNorm.convert_sync_batchnorm(lazy)
    lazy(torch.ones(2, 3))
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(lazy).num_features == 3


def test_a_weight_that_changed_before_backward_is_an_error():
    def body(rank):
        layer = hvd.SyncBatchNorm(3)
        y = layer(torch.randn(4, 3))
        with torch.no_grad():
            layer.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"changed in place .* \(version \d, was \d\)"):
            y.sum().backward()

    run_ranks(2, body)


def test_checkpointed_and_frozen_inputs():
    """A layer whose input needs no gradient sends nothing back; one in a checkpoint runs twice."""
    from torch.utils.checkpoint import checkpoint

    def layer():
        return nn.Sequential(nn.Linear(5, 5), nn.Tanh())

    first = seeded(lambda: nn.Sequential(nn.BatchNorm1d(5), layer(), nn.BatchNorm1d(5)))
    alone, *replicas = copies(first.double(), 3)
    x, y = random(8, 5), random(8, 5, seed=1)

    def gradients(model, x, y):
        hidden = checkpoint(model[1], model[0](x), use_reentrant=False)
        mse_loss(checkpoint(model[2], hidden, use_reentrant=False), y).backward()
        return [p.grad for p in model.parameters()]

    def body(rank):
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(replicas[rank])
        _optimizer = wrap(model)
        return [g.clone() for g in gradients(model, x.chunk(2)[rank], y.chunk(2)[rank])]

    want = gradients(alone, x, y)
    assert_close(run_ranks(2, body), want, 1e-11)
