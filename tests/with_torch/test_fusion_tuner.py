"""Bucket sizes that are tried out while training runs, and change no result."""

import pytest
from harness import run_ranks
from training_models import assert_close, data, fit, models, sgd, share, weights, wrap

from ringcomm.config import Settings
from ringcomm.torch.optim.fusion_tuner import CANDIDATES_MIB, STEPS_EACH, FusionTuner


def tried(seconds_of):
    """Return a tuner that has seen steps of seconds_of(mib), and their sizes in order."""
    tuner, sizes = FusionTuner(), []
    while not tuner.is_over:
        sizes.append(tuner.mib)
        is_first = sizes.count(tuner.mib) == 1
        tuner.note_step(100.0 if is_first else seconds_of(tuner.mib))
    return tuner, sizes


def test_each_size_is_tried_as_often_and_the_first_step_of_each_does_not_count():
    tuner, sizes = tried(lambda mib: 1.0)
    assert sizes == [mib for mib in CANDIDATES_MIB for _ in range(STEPS_EACH)]
    assert tuner.choose() == CANDIDATES_MIB[0]


@pytest.mark.parametrize("best", CANDIDATES_MIB)
def test_the_size_with_the_shortest_steps_is_chosen(best):
    assert tried(lambda mib: 0.5 if mib == best else 1.0)[0].choose() == best


def test_a_gain_within_the_noise_changes_nothing():
    assert tried(lambda mib: 0.99 if mib == 4.0 else 1.0)[0].choose() == CANDIDATES_MIB[0]


def test_nothing_changes_after_the_trials():
    tuner, _ = tried(lambda mib: 1.0)
    tuner.mib = 8.0
    assert not tuner.note_step(0.1)
    assert tuner.mib == 8.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_with_trials_equals_one_process_and_ranks_keep_one_size(size):
    steps = len(CANDIDATES_MIB) * STEPS_EACH + 5
    batches = data(steps, size)
    single, *replicas = models(size + 1)
    fit(single, sgd(single.parameters()), batches)

    def body(rank):
        optimizer = wrap(replicas[rank])
        fit(replicas[rank], optimizer, share(batches, rank, size))
        tuner = optimizer._reducer.plan._tuner
        assert tuner.is_over
        return weights(replicas[rank]), tuner.mib

    results = run_ranks(size, body, settings=Settings(timeout_s=120, autotune=1.0))
    assert_close([found for found, _ in results], weights(single), 1e-12)
    assert len({mib for _, mib in results}) == 1


def test_without_the_setting_nothing_is_tried():
    def body(rank):
        assert wrap(models(1)[0])._reducer.plan._tuner is None

    run_ranks(1, body)
