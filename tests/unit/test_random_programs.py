"""Random programs of collectives against numpy, over ranks as threads."""

import pytest
from faulty_transport import Faults
from harness import at_length, run_ranks
from random_programs import make_program, run_program

pytestmark = pytest.mark.usefixtures("wire")


@pytest.mark.parametrize("size", range(1, 9))
@pytest.mark.parametrize("seed", at_length(range(12), range(2)))
def test_random_programs_agree_with_numpy(seed, size):
    program = make_program(1000 * size + seed, size)
    run_ranks(size, lambda rank: run_program(program, rank, seed))


@pytest.mark.parametrize("seed", at_length(range(10), range(3)))
def test_random_programs_survive_messages_that_overtake_each_other(seed):
    program = make_program(seed, 4)
    faults = {rank: Faults(reorder_seed=10 * seed + rank) for rank in range(4)}
    run_ranks(4, lambda rank: run_program(program, rank, seed), faults=faults)
