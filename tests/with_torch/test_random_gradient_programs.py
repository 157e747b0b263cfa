"""Random programs that change .grad end as in one process, or with an error on every rank."""

import copy

import pytest
import torch
from gradient_programs import Model, carry_out, inputs, program_of
from harness import at_length, outcomes
from ps_ranks_as_threads import run_all
from training_models import seeded

import ringcomm.torch as hvd
from ringcomm.config import Settings
from ringcomm.errors import RingcommError
from ringcomm.torch import ps

WAYS = {
    "ring": {},
    "ring, sum": {"op": hvd.Sum},
    "sharded": {"shard_state": 1},
    "servers": {},
    "servers, step pushes": {"overlap": False},
    "servers, workers apply": {"overlap": False, "apply": "worker"},
}
TOLERANCE = 1e-11
PER_TEST = 10
N_PROGRAMS = at_length(2000, 30)


def make_sgd(way):
    """Return SGD; with workers that apply means, a gradient that nobody has may be zeros."""
    momentum = 0.0 if way == "servers, workers apply" else 0.5
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum)


def case_of(seed):
    """Return a program, a way, a number of ranks, and the size of buckets."""
    names = ["ring", "ring", "ring, sum", "sharded", *list(WAYS)[3:]]
    way = names[seed % len(names)]
    is_served = way.startswith("servers")
    rare = ("exchange",) if is_served or way == "sharded" else ()
    if is_served:
        rare += ("freeze",) if way == "servers" else ("freeze", "weights")
    program = program_of(seed, clamps=not is_served, rare=rare)
    if way == "servers, workers apply":  # .grad may be zeros where it is None in one process
        for step in program.steps:
            step.by_hand_after = []
    return program, way, 2 + seed // 7 % 2, (0.0001, 0.0003, 1.0)[seed // 3 % 3]


def run_on_ranks(program, way, size, fusion_mib, model):
    """Return what each rank has seen at the end, or its error."""
    replicas = [copy.deepcopy(model) for _ in range(size)]
    x = inputs(program.seed, size)
    make = ps.DistributedOptimizer if way.startswith("servers") else hvd.DistributedOptimizer
    options = WAYS[way] | {"backward_passes_per_step": program.passes_per_step}

    def body(rank):
        mine = replicas[rank]
        optimizer = make(make_sgd(way)(mine.parameters()), mine.named_parameters(), **options)
        return carry_out(program, mine, optimizer, x[:, :, rank], 1 / size if "sum" in way else 1)

    if way.startswith("servers"):
        return run_all(size, body, deadline_s=30)[:size]
    return outcomes(size, body, settings=Settings(timeout_s=30, fusion_mib=fusion_mib))


def fault_of(program, way, size, fusion_mib):
    """Return "equal" or "refused"; otherwise, what is wrong."""
    model = seeded(Model)
    got = run_on_ranks(program, way, size, fusion_mib, model)
    errors = [each for each in got if isinstance(each, BaseException)]
    if errors:
        named = len(errors) == size and all(isinstance(each, RingcommError) for each in errors)
        return "refused" if named else f"errors {errors}"
    x = inputs(program.seed, size).flatten(2, 3)
    weights, gradients, kept = carry_out(program, model, make_sgd(way)(model.parameters()), x)
    pairs = [(mine, weights, got[0][0]) for mine, _, _ in got]
    if way.startswith("ring"):
        pairs += [(mine, gradients, got[0][1]) for _, mine, _ in got]
        pairs += [(mine, kept, got[0][2]) for _, _, mine in got]
    for mine, wanted, first in pairs:
        if len(mine) != len(wanted):
            return f"{len(mine)} tensors, not {len(wanted)}"
        for a, b, c in zip(mine, wanted, first, strict=True):
            if (a is None) != (b is None):
                return f"{a} instead of {b}"
            if a is not None and (a - b).abs().max() > TOLERANCE * max(1.0, b.abs().max()):
                return f"{(a - b).abs().max():.1e} from one process"
            if a is not None and not torch.equal(a, c):
                return "ranks differ"
    return "equal"


@pytest.mark.filterwarnings("ignore:.grad was changed")  # sharded, element by element
@pytest.mark.parametrize("first", range(0, N_PROGRAMS, PER_TEST))
def test_random_programs_equal_one_process_or_are_refused(first):
    for seed in range(first, first + PER_TEST):
        program, way, size, fusion_mib = case_of(seed)
        fault = fault_of(program, way, size, fusion_mib)
        expected = ("equal",) if way == "ring" else ("equal", "refused")
        assert fault in expected, f"{way}, {size} ranks, {fusion_mib} MiB: {fault}\n{program}"
