"""The arguments of a backend's methods, as torch.distributed passes them."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from ringcomm.collectives.operators import AVERAGE, MAX
from ringcomm.torch.distributed.group.arguments import call_options


@pytest.mark.parametrize("more", [(), (True,), (7,)])
@pytest.mark.parametrize("root", [0, 2])
def test_the_first_of_a_kind_counts(root, more):
    named = {f"argument{i}": each for i, each in enumerate(more)}
    assert call_options(root, *more).root == root
    assert call_options(None, root, *more).root == root
    assert call_options(None, root=root, **named).root == root


def test_arguments_are_told_apart_by_their_types():
    call = call_options(None, root=3, op=dist.ReduceOp.MAX, timeout=timedelta(seconds=2))
    assert (call.reduction.op, call.root, call.timeout_s) == (MAX, 3, 2.0)
    call = call_options(timedelta(seconds=2), dist.ReduceOp.AVG, 3)
    assert (call.reduction.op, call.root, call.timeout_s) == (AVERAGE, 3, 2.0)
