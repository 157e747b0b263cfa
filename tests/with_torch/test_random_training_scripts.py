"""Random training scripts, each on N ranks and in one process: .grad and weights are the same."""

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from harness import at_length, run_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint
from training_models import seeded, wrap

from ringcomm.config import Settings

LAYERS = ("a", "b", "c")
ZEROINGS = (
    lambda model, optimizer: optimizer.zero_grad(),
    lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    lambda model, optimizer: model.zero_grad(),
    lambda model, optimizer: model.zero_grad(set_to_none=False),
    lambda model, optimizer: None,
)


def halve(p):
    p.grad = p.grad / 2


def halve_in_place(p):
    p.grad.mul_(0.5)


def forget(p):
    p.grad = None


def leave(p):
    pass


@dataclass
class Use:
    """One backward() of one rank: the layers it goes through, and the words it looks up."""

    layers: list[str]
    are_checkpointed: list[bool]
    words: torch.Tensor | None
    is_sparse: bool
    x: torch.Tensor


@dataclass
class Step:
    zeroing: int
    uses: list[list[Use]]  # of each rank
    frozen: set[str]
    change: object
    changed: set[int]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for layer in LAYERS:
            setattr(self, layer, nn.Linear(4, 4))
        self.unused = nn.Linear(4, 4)
        self.table = nn.Embedding(8, 4)

    def loss(self, use):
        x = use.x
        for name, is_checkpointed in zip(use.layers, use.are_checkpointed, strict=True):
            layer = getattr(self, name)
            x = checkpoint(layer, x, use_reentrant=True) if is_checkpointed else layer(x)
            x = torch.tanh(x)
        if use.words is not None:
            self.table.sparse = use.is_sparse
            x = x + self.table(use.words)
        return x.pow(2).mean()


def script_of(seed, size):
    """Return the steps, and how many passes each announces."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    passes = rng.choice([1, 1, 2, 3])
    likes_sparse = rng.choice([0.0, 1.0, 0.5])

    def use(frozen):
        layers = rng.choices([x for x in LAYERS if x not in frozen], k=rng.randint(1, 3))
        checkpointed = [False] + [rng.random() < 0.3 for _ in layers[1:]]
        words = torch.randint(0, 8, (3,), generator=generator) if rng.random() < 0.5 else None
        x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        return Use(layers, checkpointed, words, rng.random() < likes_sparse, x)

    def step():
        frozen = {rng.choice(LAYERS)} if rng.random() < 0.3 else set()
        n = rng.choice([1, passes, passes, passes + 1])
        # A rank may have fewer backward() as long as it takes part in as many reductions.
        counts = [rng.randint(0, n) if n <= passes else n for _ in range(size)]
        uses = [[use(frozen) for _ in range(count)] for count in counts]
        change = rng.choice([leave, leave, halve, halve_in_place, forget])
        return Step(rng.randrange(len(ZEROINGS)), uses, frozen, change, {0, rng.randrange(5)})

    return [step() for _ in range(8)], passes


def run(model, optimizer, script, mine):
    """Carry out a script; mine(step) are the uses of this process, each with its factor."""
    seen = []
    for step in script:
        ZEROINGS[step.zeroing](model, optimizer)
        for layer in LAYERS:
            getattr(model, layer).requires_grad_(layer not in step.frozen)
        for use, factor in mine(step):
            (factor * model.loss(use)).backward()
        if hasattr(optimizer, "synchronize"):
            optimizer.synchronize()
        for index, p in enumerate(model.parameters()):
            if index in step.changed and p.grad is not None:
                step.change(p)
        gradients = [None if p.grad is None else p.grad for p in model.parameters()]
        seen.append([None if g is None else g.to_dense().clone() for g in gradients])
        optimizer.step()
    return [*seen, [p.detach().clone() for p in model.parameters()]]


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.02)


@pytest.mark.filterwarnings("ignore:optimizer.step")  # after synchronize(), on purpose
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", at_length(range(25), range(8)))
def test_a_random_script_equals_one_process(seed, size):
    script, passes = script_of(seed, size)
    alone = seeded(lambda: Model().double())
    replicas = [copy.deepcopy(alone) for _ in range(size)]

    def body(rank):
        model = replicas[rank]
        optimizer = wrap(model, sgd, backward_passes_per_step=passes)
        return run(model, optimizer, script, lambda step: [(u, 1.0) for u in step.uses[rank]])

    results = run_ranks(size, body, settings=Settings(timeout_s=120, fusion_mib=0.0003))
    expected = run(
        alone,
        sgd(alone.parameters()),
        script,
        lambda step: [(use, 1 / size) for uses in step.uses for use in uses],
    )
    for got in results:
        for at, (mine, first, want) in enumerate(zip(got, results[0], expected, strict=True)):
            for p, q, r in zip(mine, first, want, strict=True):
                assert (p is None) == (q is None) == (r is None), at
                if p is not None:
                    assert torch.equal(p, q), at
                    assert (p - r).abs().max() <= 1e-12 * max(r.abs().max(), 1e-3), at
