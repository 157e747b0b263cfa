"""A step of training in several ways, which take turns in one process, on models of the same seed.

The time that a step takes beyond one without communication is the exposed communication: backward()
could not hide it.
"""

import argparse
import itertools
import json
from dataclasses import asdict, dataclass

import numpy as np
import torch
from bench.figure_and_goal import Figure
from bench.option_types import above_zero, names_of
from bench.torch_group import start_torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.errors import ConfigError
from ringcomm.launch.bench import take_turns
from ringcomm.launch.option_types import new_file

SEED, LEARNING_RATE = 20, 1e-3
TOLERANCE = 1e-4  # of the largest gradient: float32 sums in another order, and a product of n
ALONE = "alone"
WAYS = {  # the names, and the goals for exposed communication / that of DDP over gloo
    "ring": ("DistributedOptimizer", 0.25),
    "ddp": ("DDP over ringcomm", 0.5),
    "hook": ("DDP with node_hook", 0.25),
    "ps": ("parameter server", None),
    "gloo": ("DDP over gloo", None),
}


# --- models ---------------------------------------------------------------------------------------
TOKENS, WIDTH, LENGTH = 8192, 256, 64


def mlp():
    """Return a perceptron of 20 M parameters in 12 tensors."""
    widths = [1024, 2048, 2048, 2048, 2048, 2048, 512]
    layers = [(nn.Linear(*pair), nn.ReLU()) for pair in itertools.pairwise(widths)]
    return nn.Sequential(*list(itertools.chain(*layers))[:-1])


class Transformer(nn.Module):
    """A language model of 7 M parameters: many small tensors, and two large ones."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, nhead=4, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=4)
        self.head = nn.Linear(WIDTH, TOKENS)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embedding(tokens), mask=self.mask, is_causal=True))


def square_loss(model, x):
    return model(x).pow(2).mean()


def next_token_loss(model, tokens):
    scores = model(tokens[:, :-1])
    return nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(frozen=True)
class Workload:
    """A model, samples of a rank's batch by default, how to make them, and the loss."""

    make: type
    samples: int
    batch: type
    loss: type


WORKLOADS = {
    "mlp": Workload(mlp, 32, lambda n: torch.randn(n, 1024), square_loss),
    "transformer": Workload(
        Transformer, 8, lambda n: torch.randint(TOKENS, (n, LENGTH + 1)), next_token_loss
    ),
}


# --- ways to train --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Variant:
    """A model, and how it is trained."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, loss, batch):
        self.optimizer.zero_grad()
        loss(self.model, batch).backward()
        self.optimizer.step()


def variant(way, workload):
    """Return one of WAYS, or ALONE, on a model of the same weights each time."""
    torch.manual_seed(SEED)
    model = workload.make()
    sgd = SGD(model.parameters(), lr=LEARNING_RATE)
    if way == "ring":
        sgd = hvd.DistributedOptimizer(sgd, model.named_parameters())
    if way == "ps":
        from ringcomm.torch import ps

        sgd = ps.DistributedOptimizer(sgd, model.named_parameters(), mode="sync")
    if way in ("ddp", "hook", "gloo"):
        dist = start_torch()
        group = dist.new_group(backend="gloo") if way == "gloo" else None
        model = DistributedDataParallel(model, process_group=group)
    if way == "hook":
        model.register_comm_hook(None, hvd.node_hook)
    return Variant(way, model, sgd)


# --- the command ----------------------------------------------------------------------------------
def main(argv):
    args = parsed(argv)
    rc.init()
    if "ps" in args.ways:
        from ringcomm import ps

        ps.init(1)  # the last rank ends here, when the others do
    if rc.size() == 1:
        raise ConfigError("1 rank, and an average takes two: mpirun -np 2 python ci/bench step")
    torch.set_num_threads(args.threads)
    found = measure(args)
    if rc.rank() == 0:
        print(*lines(found), sep="\n", flush=True)
        if args.json is not None:
            report = found | {"figures": [asdict(each) for each in found["figures"]]}
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if "ps" not in args.ways:  # servers leave when programs end
        rc.shutdown()
    return 0 if found["is_equal"] else 1


def parsed(argv):
    parser = argparse.ArgumentParser(prog="ci/bench step", description=__doc__)
    add = parser.add_argument
    add("--model", choices=list(WORKLOADS), default="mlp")
    add("--ways", type=names_of(tuple(WAYS)), default=("ring", "gloo"), metavar="NAME,...",
        help=f"{', '.join(WAYS)}; default ring,gloo")  # fmt: skip
    add("--steps", type=above_zero(int), default=30, help="to time, of each; default 30")
    add("--batch", type=above_zero(int), help="samples per rank; default 32 or 8")
    add("--threads", type=above_zero(int), default=1, help="of torch per rank; default 1")
    add("--json", type=new_file, metavar="FILE", help="write what was found, too")
    args = parser.parse_args(argv)
    if "ps" in args.ways and set(args.ways) - {"ps", "ring"}:
        parser.error("--ways ps goes with ring alone: its server is no rank of torch.distributed")
    if not {"ring", "gloo"} & set(args.ways):
        parser.error("--ways needs ring or gloo, whose gradients the others are compared with")
    return args


def measure(args):
    """Return what was found, alike on all ranks. Collective."""
    workload = WORKLOADS[args.model]
    torch.manual_seed(SEED + 1 + rc.rank())
    n = args.batch or workload.samples
    batch = workload.batch(n)
    ways = sorted(args.ways, key=list(WAYS).index)
    variants = [variant(way, workload) for way in (ALONE, *ways)]
    difference = difference_after_one_step(variants, workload, batch)
    found = {
        "version": rc.__version__,
        "model": args.model,
        "parameters": sum(p.numel() for p in variants[0].model.parameters()),
        "size": rc.size(),
        "threads": args.threads,
        "batch": n,
        "steps": args.steps,
        "difference": difference,
        "is_equal": difference <= TOLERANCE,
        "lines": [],
        "figures": [],
    }
    if found["is_equal"]:
        calls = [lambda each=each: each.step(workload.loss, batch) for each in variants]
        times_s = take_turns(calls, 0, args.steps)
        found["lines"] = summary([each.name for each in variants], times_s)
        found["figures"] = figures(found["lines"])
    return found


def summary(names, times_s):
    """Return a line of each variant: medians over rounds, of the slowest rank's step."""
    return [
        {
            "name": name,
            "step_ms": float(np.median(steps)) * 1e3,
            # Within a round: if the machine is slow for a while, it is so for all of them.
            "exposed_ms": float(np.median(steps - times_s[0])) * 1e3,
        }
        for name, steps in zip(names, times_s, strict=True)
    ]


def figures(found):
    """Return each way's communication beside gloo's, and the server's step beside the ring's."""
    of = {line["name"]: line for line in found}
    text = []
    if "gloo" in of and of["gloo"]["exposed_ms"] > 0:
        for way in [way for way in WAYS if way in of and way != "gloo"]:
            ratio = of[way]["exposed_ms"] / of["gloo"]["exposed_ms"]
            text.append(Figure(f"{WAYS[way][0]} / gloo, exposed", ratio, at_most=WAYS[way][1]))
    if {"ps", "ring"} <= set(of):
        ratio = of["ps"]["step_ms"] / of["ring"]["step_ms"]
        text.append(Figure("server / ring, step", ratio, at_most=1.5))
    return text


def difference_after_one_step(variants, workload, batch):
    """Return the largest difference of gradients and weights to the last variant's, on any rank.

    In units of the largest gradient, weights in units of a step along it. The parameter server's
    optimizer leaves gradients alone: its weights are compared. The first variant does not
    communicate, and is not compared.
    """
    for each in variants:
        each.step(workload.loss, batch)
    right = [each for each in variants if each.name in ("ring", "gloo")][-1]
    others = [each for each in variants[1:] if each is not right]
    found = max((difference(each, right) for each in others), default=0.0)
    return float(np.max(rc.allgather_object(np.nan_to_num(found, nan=np.inf))))


def difference(mine, right):
    pairs = list(zip(mine.model.parameters(), right.model.parameters(), strict=True))
    largest = max(q.grad.abs().max().item() for _, q in pairs)
    # A weight of 1 moves by less than its own rounding: that is no difference of the step.
    weights = max(beyond_rounding(p.detach(), q.detach()) for p, q in pairs)
    found = [weights / (LEARNING_RATE * largest)]
    if mine.name != "ps":
        found += [(p.grad - q.grad).abs().max().item() / largest for p, q in pairs]
    return float(np.max(found))


def beyond_rounding(p, q):
    rounding = torch.finfo(p.dtype).eps * torch.maximum(p.abs(), q.abs())
    return ((p - q).abs() - 2 * rounding).clamp(min=0).max().item()


def lines(found):
    text = [
        f"# ci/bench step {found['version']}: {found['model']}, "
        f"{found['parameters'] / 1e6:.1f} M parameters, {found['batch']} samples per rank",
        f"# {found['size']} ranks, {found['threads']} thread(s) each, {found['steps']} steps; "
        f"gradients and weights differ by {found['difference']:.1e}",
    ]
    if not found["is_equal"]:
        return [*text, f"# WRONG: more than {TOLERANCE:g} of the largest gradient; not timed"]
    text.append(f"{'':<22}{'step p50':>12}{'exposed':>12}")
    for line in found["lines"]:
        name = WAYS.get(line["name"], ("no communication",))[0]
        text.append(f"{name:<22}{line['step_ms']:>9.2f} ms{line['exposed_ms']:>9.2f} ms")
    return [*text, *map(str, found["figures"])]
