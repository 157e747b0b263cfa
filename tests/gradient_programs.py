"""Random training programs that do to .grad, weights and param_groups what people do."""

import random
from dataclasses import dataclass, field

import torch
from torch import nn

LAYERS = ("a", "b", "c", "d")
N_STEPS = 6
BATCH = 3

# How a program clears gradients.
CLEARINGS = ("optimizer", "optimizer zeros", "model", "model zeros", "data zeros", "never")
# What it does to one .grad; each is linear, so that it may come before or after the reduction.
CHANGES = ("mul", "data mul", "data =", "assign", "mask", "none", "view")
# What it does to one .grad when that is reduced, besides.
FINAL_CHANGES = ("clamp", "data clamp")
PUTS = ("assign", "copy", "data copy", "add")
HOOKS = ("tensor", "mul", "data mul", "data =", "assign", "log")
WEIGHTS = ("mul", "data mul", "data =")


@dataclass
class Step:
    """One step: what happens, in this order."""

    clearing: str
    hooks: list = field(default_factory=list)  # (parameter, kind), attached before it
    unhooked: bool = False  # remove all hooks before it
    exchanged: list = field(default_factory=list)  # parameters
    frozen: frozenset = frozenset()  # layers
    by_hand: list = field(default_factory=list)  # (parameter, how), before backward()
    passes: list = field(default_factory=list)  # the layers of each backward()
    between: list = field(default_factory=list)  # (parameter, change), between passes
    after: list = field(default_factory=list)  # (parameter, change), after them
    by_hand_after: list = field(default_factory=list)  # layers without a gradient
    ending: str = "step"  # or "drop", or "twice"
    weights: list = field(default_factory=list)  # (parameter, change)
    is_kept: bool = False  # keep references to .grad


@dataclass
class Program:
    seed: int
    passes_per_step: int
    is_flat: bool  # .grad are pieces of one tensor
    steps: list

    def __str__(self):
        heading = f"program {self.seed}: {self.passes_per_step} passes, flat: {self.is_flat}"
        return "\n".join([heading, *(f"  {step}" for step in self.steps)])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for layer in LAYERS:
            setattr(self, layer, nn.Linear(3, 3, dtype=torch.float64))

    def loss(self, layers, x):
        for layer in layers:
            x = torch.tanh(getattr(self, layer)(x))
        return x.pow(2).mean()

    @property
    def all(self):
        return list(self.parameters())


def program_of(seed, *, clamps=True, rare=()):
    """Return a random program, the same for each seed.

    clamps: change gradients that are means. rare: what the way to train mostly refuses.
    """
    rng = random.Random(seed)
    # Most programs do few of these things, and some do all of them.
    likes = {
        name: rng.random() < (0.1 if name in rare else 0.4)
        for name in ("hooks", "exchange", "freeze", "hand", "change", "drop", "weights", "keep")
    }
    passes_per_step = rng.choice([1, 1, 1, 2])
    clearings = rng.choice([CLEARINGS[:1], CLEARINGS[:2], CLEARINGS])
    n = 2 * len(LAYERS)

    def some(kinds, share):
        return [(k, rng.choice(kinds)) for k in range(n) if rng.random() < share]

    def step(number):
        s = Step(rng.choice(clearings))
        if likes["freeze"] and rng.random() < 0.4:
            s.frozen = frozenset(rng.sample(LAYERS, 1))
        free = [layer for layer in LAYERS if layer not in s.frozen]
        n_passes = passes_per_step if rng.random() < 0.7 else rng.randint(0, 3)
        s.passes = [rng.sample(free, rng.randint(1, len(free))) for _ in range(n_passes)]
        if likes["hooks"] and rng.random() < 0.5:
            s.hooks, s.unhooked = some(HOOKS, 0.3), rng.random() < 0.5
        if likes["exchange"] and number and rng.random() < 0.4:
            s.exchanged = rng.sample(range(n), rng.choice([1, 1, n]))
        if likes["hand"] and rng.random() < 0.6:
            s.by_hand = some(PUTS, 0.4)
            used = {layer for layers in s.passes for layer in layers}
            s.by_hand_after = [x for x in free if x not in used and rng.random() < 0.3]
        if likes["change"] and rng.random() < 0.7:
            s.between = some(CHANGES, 0.3)
            s.after = some(CHANGES + FINAL_CHANGES * clamps, 0.3)
        if likes["drop"] and rng.random() < 0.3:
            s.ending = rng.choice(["drop", "twice"])
        if likes["weights"] and rng.random() < 0.4:
            s.weights = some(WEIGHTS, 0.3)
        # A program that replaces .grad before it is reduced keeps this rank's own gradient.
        s.is_kept = likes["keep"] and not likes["hooks"] and not likes["change"]
        return s

    return Program(seed, passes_per_step, rng.random() < 0.1, [step(k) for k in range(N_STEPS)])


def inputs(seed, size):
    """Return x of each step and pass, of all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_STEPS, 4, size, BATCH, 3, generator=generator, dtype=torch.float64)


def carry_out(program, model, optimizer, x, factor=1.0):
    """Run a program; x: (steps, passes, samples, 3). Return all that it can see at the end.

    factor: of the losses.
    """
    run = _Run(model, optimizer, factor, program.passes_per_step)
    if program.is_flat:
        run.lay_out_flat()
    for step, xs in zip(program.steps, x, strict=True):
        run.step(step, xs)
    return run.seen()


class _Run:
    def __init__(self, model, optimizer, factor, passes_per_step):
        self.model, self.optimizer, self.factor = model, optimizer, factor
        self.passes_per_step = passes_per_step
        self.hooks, self.attached, self.kept = [], [], []

    def lay_out_flat(self):
        flat = torch.zeros(sum(p.numel() for p in self.model.all), dtype=torch.float64)
        pieces = flat.split([p.numel() for p in self.model.all])
        for p, piece in zip(self.model.all, pieces, strict=True):
            p.grad = piece.view_as(p)

    def step(self, step, xs):
        self.prepare(step)
        for k, how in step.by_hand:
            self.put(k, how, xs[3])
        for number, layers in enumerate(step.passes):
            for k, change in step.between if number else ():
                self.change(k, change)
            self.loss(layers, xs[number]).backward()
        for k, change in step.after:
            is_mean = len(step.passes) >= self.passes_per_step and k not in step.exchanged
            if is_mean or change not in FINAL_CHANGES:
                self.change(k, change)
        self.end(step, xs)

    def prepare(self, step):
        for k in step.exchanged:
            self.exchange(k)
        self.clear(step.clearing)
        if step.unhooked:
            self.unhook()
        for k, kind in step.hooks:
            self.hook(k, kind)
        for layer in LAYERS:
            getattr(self.model, layer).requires_grad_(layer not in step.frozen)

    def end(self, step, xs):
        model, optimizer = self.model, self.optimizer
        for layer in step.by_hand_after:
            for k in (2 * LAYERS.index(layer), 2 * LAYERS.index(layer) + 1):
                if model.all[k].grad is None:
                    self.put(k, "assign", xs[3])
        if step.ending == "drop":
            optimizer.zero_grad()
        else:
            optimizer.step()
        if step.ending == "twice":
            optimizer.step()
        if step.is_kept:
            self.kept += [p.grad.view(-1) for p in model.all if p.grad is not None]
        for k, change in step.weights:
            self.change_weights(k, change)

    def loss(self, layers, x):
        return self.factor * self.model.loss(layers, x)

    def clear(self, how):
        if how.startswith("data"):
            for p in self.model.all:
                if p.grad is not None:
                    p.grad.data.zero_()
        elif how != "never":
            cleared = self.optimizer if how.startswith("optimizer") else self.model
            cleared.zero_grad(set_to_none=not how.endswith("zeros"))

    def exchange(self, k):
        old = self.model.all[k]
        new = nn.Parameter(0.9 * old.detach())
        setattr(getattr(self.model, LAYERS[k // 2]), ("weight", "bias")[k % 2], new)
        for group in self.optimizer.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        state = self.optimizer.state.pop(old, None)
        if state:
            self.optimizer.state[new] = state

    def put(self, k, how, x):
        p = self.model.all[k]
        if not p.requires_grad:
            return
        layer = LAYERS[k // 2]
        (g,) = torch.autograd.grad(self.loss([layer], x), [p])
        if how == "assign" or p.grad is None:
            p.grad = g
        elif how == "copy":
            p.grad.copy_(g)
        elif how == "data copy":
            p.grad.data.copy_(g)
        else:
            p.grad.add_(g)

    def change(self, k, how):
        p = self.model.all[k]
        if p.grad is None:
            return
        if how == "mul":
            p.grad.mul_(0.5)
        elif how == "data mul":
            p.grad.data.mul_(0.5)
        elif how == "data =":
            p.grad.data = p.grad.data * 0.5
        elif how == "assign":
            p.grad = p.grad * 0.5
        elif how == "mask":
            p.grad = p.grad * (torch.arange(p.numel()).view_as(p) % 3 > 0)
        elif how == "none":
            p.grad = None
        elif how == "view":
            p.grad = p.grad.view_as(p)
        elif how == "clamp":
            p.grad.clamp_(-0.01, 0.01)
        else:
            p.grad.data.clamp_(-0.01, 0.01)

    def change_weights(self, k, how):
        p = self.model.all[k]
        if how == "mul":
            with torch.no_grad():
                p.mul_(0.9)
        elif how == "data mul":
            p.data.mul_(0.9)
        else:
            p.data = p.data * 0.9

    def hook(self, k, kind):
        p = self.model.all[k]
        if not p.requires_grad:
            return
        if kind == "tensor":
            self.hooks.append(p.register_hook(lambda g: g * 0.5))
        elif kind == "log":
            log = []
            self.hooks.append(
                p.register_post_accumulate_grad_hook(lambda p: log.append(p.grad.sum()))
            )
        else:
            change = self.change
            self.hooks.append(p.register_post_accumulate_grad_hook(lambda p: change(k, kind)))

    def unhook(self):
        for handle in self.hooks:
            handle.remove()
        self.hooks.clear()

    def seen(self):
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.all]
        return [p.detach().clone() for p in self.model.all], gradients, self.kept
