"""What looks like a mistake is told once: the same data on all ranks, or a process alone."""

import logging
import re
import sys

import pytest
import torch
from harness import DEADLINE_S, job_environment, run_command, run_ranks

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.config import Settings
from ringcomm.torch.optim.bucket_order import NO_VALUES, digest_of

SAME = "the first gradients of all 2 ranks are the same bit for bit"
ADVICE = "DataLoader(dataset, batch_sampler=ringcomm.data.ShardedSampler(dataset).batches(n))"


def train(rank, data_of, hints=1):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    sgd = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(3):
        sgd.zero_grad()
        model(data_of(rank, step)).sum().backward()
        sgd.step()


@pytest.mark.parametrize(
    ("data_of", "hints", "n_told"),
    [
        (lambda rank, step: torch.full((4, 3), 1.0 + step), 1, 1),
        (lambda rank, step: torch.full((4, 3), 1.0 + step), 0, 0),
        (lambda rank, step: torch.full((4, 3), 1.0 + step + (rank if step == 0 else 0)), 1, 0),
        (lambda rank, step: torch.zeros(4, 3) if step == 0 else torch.ones(4, 3), 1, 1),  # the bias
    ],
    ids=["same data", "silenced", "its own data", "zeros and a bias"],
)
def test_ranks_that_train_on_the_same_data_are_told_once(data_of, hints, n_told, caplog):
    settings = Settings(timeout_s=DEADLINE_S, hints=hints)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        run_ranks(2, lambda rank: train(rank, data_of), settings=settings)
    told = [each.message for each in caplog.records if SAME in each.message]
    assert len(told) == n_told
    assert all(ADVICE in each for each in told)


def test_the_advice_is_one_that_a_data_loader_takes():
    dataset, n = range(10), 2
    names = {"DataLoader": torch.utils.data.DataLoader, "ringcomm": rc, "dataset": dataset, "n": n}
    batches = run_ranks(2, lambda rank: [batch.tolist() for batch in eval(ADVICE, names)])
    assert [list(map(len, each)) for each in batches] == [[2, 2, 1]] * 2
    assert sorted(sample for each in batches for batch in each for sample in batch) == [*dataset]


def test_gradients_that_are_zero_or_missing_say_nothing():
    assert digest_of([None, torch.zeros(3), torch.zeros(0)]) == NO_VALUES
    assert digest_of([torch.tensor(1.0)]) != digest_of([torch.tensor(2.0)])
    assert digest_of([torch.ones(2, dtype=torch.bfloat16), None]) != NO_VALUES
    z = torch.tensor([1 + 2j, 3 - 1j])
    assert digest_of([z.conj(), z.conj().imag]) not in (NO_VALUES, digest_of([z, z.imag]))


ALONE = """
import os, sys
import ringcomm.torch as hvd
for hints in "01":
    os.environ["RINGCOMM_HINTS"] = hints
    hvd.init()
    print("hints", hints, file=sys.stderr)
    hvd.shutdown()
hvd.init()
import torch.distributed as dist
try:
    dist.init_process_group("ringcomm")
except RuntimeError as error:
    print(type(error).__name__, error, file=sys.stderr)
"""


def test_a_process_that_nothing_has_started_as_a_rank_is_told_how_to_start_several(tmp_path):
    (tmp_path / "train.py").write_text(ALONE)
    job = run_command([sys.executable, "-P", "train.py"], cwd=tmp_path, env=job_environment())
    silenced, told, _ = re.split(r"hints \d\n", job.stderr)
    assert silenced == "", job.stderr
    assert "1 process, which trains alone. Several ranks: ringcomm run -np N train.py" in told
    assert "ConfigError torch.distributed: nothing has started this process as a rank" in job.stderr
