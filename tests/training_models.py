"""What the tests of the torch face share: small models, their data, and the one-process oracle."""

import copy
from types import SimpleNamespace

import pytest
import torch
from harness import at_length, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

import ringcomm
import ringcomm.torch as hvd
from ringcomm.config import Settings

torch.set_num_threads(1)
BATCH = 6
STEPS = at_length(8, 6)  # buckets are made anew after the first, and most changes come in the third
# The engine is tested with every number of ranks; three show what two do not, such as odd shares.
SIZES = pytest.mark.parametrize("size", at_length([1, 2, 3], [3]))
SHARDED = pytest.mark.parametrize("shard_state", [0, 1])
SMALL = Settings(timeout_s=120, fusion_mib=0.0005)  # 524 bytes: some buckets for each model here


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def network(dtype=torch.float64):
    return seeded(
        lambda: nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 3))
    ).to(dtype)


class Checkpointed(nn.Module):
    """Runs its layers in checkpoints; those within backward() are reentrant in most modes."""

    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.a, self.b, self.c = (nn.Linear(5, 5) for _ in range(3))
        self.out = nn.Linear(5, 3)

    def forward(self, x):
        def saved(part, x, is_reentrant=True):
            return checkpoint(part, x, use_reentrant=is_reentrant)

        x = x.clone().requires_grad_() if self.mode == "everything" else self.a(x)
        if self.mode == "not reentrant":
            return self.out(saved(self.c, saved(self.b, x, False), False))
        if self.mode == "reentrant":
            return self.out(saved(self.c, saved(self.b, x)))
        if self.mode == "everything":
            return saved(self.out, saved(self.b, saved(self.a, x)))
        if self.mode == "nested":
            return saved(lambda x: self.out(saved(self.b, torch.tanh(x))), saved(self.c, x))
        assert self.mode == "a module twice"  # so that its gradients come in two parts
        return self.out(saved(self.b, torch.tanh(self.c(saved(self.b, x)))))


class Experts(nn.Module):
    """Each sample goes through the expert that its first feature asks for; the last is unused."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.experts = nn.ModuleList([nn.Linear(5, 3) for _ in range(4)])

    def forward(self, x):
        asked = x[:, 0].long()
        hidden = self.shared(x)
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        for which in asked.unique().tolist():
            out = out.index_add(
                0, (asked == which).nonzero()[:, 0], self.experts[which](hidden[asked == which])
            )
        return out


def seeded(make):
    """Return make(), with the same weights in every run."""
    torch.random.default_generator.manual_seed(0)
    return make()


def models(n, **kwargs):
    """Return n networks of the same weights, before ranks start: threads share one generator."""
    return copies(network(**kwargs), n)


def copies(model, n):
    return [copy.deepcopy(model) for _ in range(n)]


def data(steps, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps, size * BATCH, 5, generator=generator, dtype=dtype)
    y = torch.randn(steps, size * BATCH, 3, generator=generator, dtype=dtype)
    return list(zip(x, y, strict=True))


def batches_for_experts(size, steps=8):
    """Make batches that leave out an expert in some steps, and of which ranks use others."""
    batches = data(steps, size)
    for step, (x, _) in enumerate(batches):
        for rank, part in enumerate(x.chunk(size)):
            part[:, 0] = [rank % 3, 0, 1 + rank % 2, 2][step % 4]
    return batches


def share(batches, rank, size):
    return [tuple(part.chunk(size)[rank] for part in batch) for batch in batches]


def wrap(model, make=sgd, **kwargs):
    return hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), **kwargs)


def fit(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def traced_of_ringcomm(run):
    """Return the functions of ringcomm that torch.compile would trace while run() is called.

    It asks by the same callback as torch.compile, which loads 5 s of modules for its answers.
    """
    frames, asked = torch._C._dynamo.eval_frame, []
    as_it_is = frames._FrameAction.DEFAULT
    answer = SimpleNamespace(
        apply_to_code=False,
        guarded_code=None,
        frame_exec_strategy=frames._FrameExecStrategy(as_it_is, as_it_is),
    )

    def hear(frame, *_):
        asked.append(frame.f_code)
        return answer

    before = frames.set_eval_frame(hear)
    try:
        run()
    finally:
        frames.set_eval_frame(before)
    assert any(code.co_filename.startswith(torch.__path__[0]) for code in asked)
    ours = ringcomm.__path__[0]
    return [code.co_qualname for code in asked if code.co_filename.startswith(ours)]


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def on_replicas(
    size, body, make=sgd, *, model=None, steps=0, settings=SMALL, run=run_ranks, **wrapping
):
    """Run body(rank, model, optimizer, mine) on ranks whose models are alike, and wrapped.

    mine: the rank's share of each of so many batches, data(steps, size).
    """
    replicas = copies(network() if model is None else model, size)
    batches = data(steps, size)

    def on_rank(rank):
        model = replicas[rank]
        return body(rank, model, wrap(model, make, **wrapping), share(batches, rank, size))

    return run(size, on_rank, settings=settings)


def assert_equals_one_process(
    size,
    train=fit,
    *,
    model=None,
    make=sgd,
    batches=None,
    split=share,
    tolerance=1e-12,
    settings=SMALL,
    **wrapping,
):
    """Assert that ranks with a share of each batch end with the weights of one process with all.

    train(model, optimizer, batches) is what both do; split(batches, rank, size) makes the shares.
    """
    batches = data(STEPS, size) if batches is None else batches
    alone, *replicas = copies(network() if model is None else model, size + 1)
    start = weights(alone)
    train(alone, make(alone.parameters()), batches)

    def body(rank):
        optimizer = wrap(replicas[rank], make, **wrapping)
        train(replicas[rank], optimizer, split(batches, rank, size))
        return weights(replicas[rank])

    results = run_ranks(size, body, settings=settings)
    assert any(not torch.equal(a, b) for a, b in zip(start, weights(alone), strict=True))
    assert_close(results, weights(alone), tolerance)


def assert_close(results, expected, tolerance):
    """Assert that all ranks have the same bits, and those the expected values."""
    for got in results:
        for mine, first, want in zip(got, results[0], expected, strict=True):
            assert torch.equal(mine, first)
            assert (mine - want).abs().max() <= tolerance * want.abs().max()


def nesterov(p):
    return torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1)


def adamw(p):
    return torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1)


class Counting(torch.optim.SGD):
    """Has its number of steps where some optimizers have it, and each step is smaller."""

    is_elementwise = True

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr"] = 0.1 / group["step"]
        return super().step(closure)


def assert_sharded_equals_one_process(size, train=fit, **kwargs):
    assert_equals_one_process(size, train, shard_state=1, **kwargs)
