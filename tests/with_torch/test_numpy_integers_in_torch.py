"""Integers of numpy in the API for torch: optimizers and process sets."""

import numpy as np
import pytest
import torch
from harness import run_ranks
from torch import nn
from training_models import wrap

import ringcomm.torch as hvd
from ringcomm.integers import is_integer
from ringcomm.torch.distributed.group.arguments import call_options
from ringcomm.torch.distributed.group.base import compare

N = np.int64


def trained(**options):
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = wrap(model, **options)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    "options",
    [
        {"backward_passes_per_step": N(1)},
        {"groups": N(2)},
        {"num_groups": N(2)},
        {"shard_state": N(1)},
        {"op": hvd.Adasum, "backward_passes_per_step": N(1)},
    ],
    ids=str,
)
def test_optimizers_take_integers_of_numpy(options):
    run_ranks(2, lambda _: [trained(**options)])


def test_ranks_may_differ_in_the_type_of_an_integer():
    def body(rank):
        trained(backward_passes_per_step=N(1) if rank else 1, groups=N(2) if rank else 2)

    run_ranks(2, body)


def test_process_sets_take_integers_of_numpy():
    def body(rank):
        made = hvd.add_process_set(np.arange(2))
        assert made.ranks == [0, 1]
        assert all(type(each) is int for each in made.ranks)
        if rank < 2:
            return hvd.allreduce(torch.ones(1) * rank, process_set=made, op=hvd.Sum).item()
        return None

    assert run_ranks(3, body) == [1.0, 1.0, None]


@pytest.mark.parametrize("ranks", [[True, False], [0.0, 1.0], ["0"]], ids=str)
def test_process_sets_take_nothing_else(ranks):
    with pytest.raises(ValueError, match="ProcessSet takes ranks, ints"):
        hvd.ProcessSet(ranks)


@pytest.mark.parametrize("n", [True, 1.0, np.float64(1), 0, N(0)], ids=repr)
def test_passes_are_integers_from_1_on(n):
    with pytest.raises(ValueError, match="a whole number from 1 on"):
        run_ranks(1, lambda _: trained(backward_passes_per_step=n))


def test_a_root_in_the_short_form_is_not_passed_over():
    assert call_options(None, N(2)).root == 2


def test_a_new_group_takes_ranks_of_numpy_and_no_floats():
    assert compare(np.arange(2), [0, 1], 1).call.kind == "new_group"
    with pytest.raises(TypeError, match="new_group: a rank must be an int"):
        compare([0.5], [0, 1], 1)


def test_a_tensor_is_an_integer_if_it_has_one_integer():
    assert is_integer(torch.tensor(3))
    assert not is_integer(torch.ones(3))
