"""The pure decisions behind DistributedOptimizer."""

import pytest

from ringcomm.torch.backward.consistency_check import OptimizerSummary, explain
from ringcomm.torch.optim.buckets import is_dense
from ringcomm.torch.optim.exchange import explain_samples, explain_steps
from ringcomm.torch.optim.gradient_presence import (
    DENSE,
    FAILED,
    HAS_SAMPLES,
    LATE,
    SPARSE,
    UNWEIGHTED,
    WEIGHTED,
    GradientPresence,
    ready_order,
    samples_fault,
)


@pytest.mark.parametrize(
    ("fired", "n", "expected"),
    [([], 3, [2, 1, 0]), ([0, 2], 4, [0, 2, 3, 1]), ([1, 0], 2, [1, 0])],
)
def test_what_did_not_fire_comes_last_and_from_behind(fired, n, expected):
    assert ready_order(fired, n) == expected


@pytest.mark.parametrize(
    ("shape", "strides", "expected"),
    [
        ((2, 3), (3, 1), True),
        ((2, 3), (1, 2), True),
        ((2, 3, 4, 5), (60, 1, 15, 3), True),
        ((2, 1), (1, 77), True),
        ((), (), True),
        ((2, 3), (4, 1), False),
        ((2, 3), (0, 1), False),
        ((2, 2), (1, 1), False),
    ],
)
def test_dense_is_what_fills_its_memory(shape, strides, expected):
    assert is_dense(shape, strides) is expected


def union(*messages):
    combined = bytearray(len(messages[0]))
    for message in messages:
        combined = bytearray(a | b for a, b in zip(combined, message, strict=True))
    return GradientPresence.unpack(bytes(combined))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [((0, 0), True), ((7, 7, 7), True), ((1, 2), False), ((1, 3), False), ((2**40, 0), False)],
)
def test_a_union_tells_whether_all_are_in_one_step(steps, expected):
    messages = [GradientPresence(b"\0\1", UNWEIGHTED).pack(step) for step in steps]
    assert union(*messages).is_one_step is expected


def test_a_union_has_what_any_rank_has():
    one = GradientPresence(bytes([DENSE, 0, 0]), UNWEIGHTED)
    two = GradientPresence(bytes([DENSE | LATE, SPARSE, 0]), UNWEIGHTED | FAILED)
    result = union(one.pack(5), two.pack(5))
    assert result == GradientPresence(bytes([DENSE | LATE, SPARSE, 0]), UNWEIGHTED | FAILED)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (UNWEIGHTED, None),
        (WEIGHTED | HAS_SAMPLES, None),
        (WEIGHTED, "empty"),
        (WEIGHTED | UNWEIGHTED | HAS_SAMPLES, "partial"),
    ],
)
def test_faults_in_the_use_of_samples(flags, expected):
    assert samples_fault(GradientPresence(b"", flags)) == expected


def test_explanations_name_the_ranks_and_both_values():
    assert "rank 0 is in step 4, rank 2 in step 6" in explain_steps([3, 3, 5])
    assert "rank 1 called set_samples(7) for this step, rank 0 did" in explain_samples(
        [(None,), (7,)]
    )
    assert "rank 1 is in step 4, rank 3 in step 6" in explain_steps([None, 3, None, 5])
    samples = [None, (7,), None, (None,)]  # ranks 0 and 2 are in join()
    assert "rank 1 called set_samples(7) for this step, rank 3 did" in explain_samples(samples)
    one = OptimizerSummary((("a", "x"), ("b", "y")), (("op", "SUM"),))
    two = OptimizerSummary((("b", "y"), ("a", "x")), (("op", "SUM"),))
    assert "rank 0 has a x, rank 1 has b y" in explain([one, two])
    assert "rank 1 has a x, rank 4 has b y" in explain([None, one, None, one, two])  # in join()
