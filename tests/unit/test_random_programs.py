"""Random programs of collectives and messages against numpy, over ranks as threads."""

import pytest
from faulty_transport import Faults
from harness import DEADLINE_S, at_length, run_ranks
from loopback import LoopbackHub
from random_programs import make_program, run_program

from ringcomm.config import Settings

pytestmark = pytest.mark.usefixtures("wire")


def how(seed):
    """Return settings: in every other program, long messages within a node come in pieces."""
    return Settings(timeout_s=DEADLINE_S, read_memory=seed % 2)


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("seed", at_length(range(12), range(2)))
def test_random_programs_agree_with_numpy(seed, size):
    program = make_program(1000 * size + seed, size)
    run_ranks(size, lambda rank: run_program(program, rank, seed), settings=how(seed))


@pytest.mark.parametrize("seed", at_length(range(12), range(4)))
def test_random_programs_agree_with_numpy_where_some_ranks_share_memory(seed):
    program = make_program(100 + seed, 4)
    hub = LoopbackHub(4, (0, 0, 2, 2))
    run_ranks(4, lambda rank: run_program(program, rank, seed), hub=hub, settings=how(seed))


@pytest.mark.parametrize("seed", at_length(range(10), range(3)))
def test_random_programs_survive_messages_that_overtake_each_other(seed):
    program = make_program(seed, 4)
    faults = {rank: Faults(reorder_seed=10 * seed + rank) for rank in range(4)}
    run_ranks(4, lambda rank: run_program(program, rank, seed), faults=faults)
