"""What dist.new_group() takes from which rank; jobs: tests/mpi/torch_distributed_suite.py."""

import pytest

from ringcomm.torch.distributed.group.base import are_consistent

HALVES = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, True),
        ({0: (0,), 2: (0,)}, True),  # rank 2 makes the other part of its half next
        ({0: (0, 1)}, False),  # rank 1 makes another
        ({0: (2, 0)}, False),  # in another order
        ({0: (0,)}, False),  # rank 2 believes in the half
        ({0: (2,)}, False),  # rank 2 is not about to be alone
        ({3: (0, 2)}, False),  # whom rank 1 waits for
    ],
)
def test_whoever_is_in_a_list_has_to_pass_it(changed, expected):
    assert are_consistent(HALVES | changed) is expected
