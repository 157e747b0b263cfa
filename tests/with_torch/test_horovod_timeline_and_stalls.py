"""Horovod's timeline and its stall check, through the torch face: what a user sets and sees."""

import json

import pytest
from harness import PROMPTLY_S, run_script

TRAINING = """
import os, sys, time
import torch, ringcomm.torch as hvd

def train(steps=2):
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
"""


def events(path):
    return json.loads(path.read_text())


def begun(path):
    return [event["name"] for event in events(path) if event["ph"] == "B"]


@pytest.mark.at_length
def test_start_and_stop_timeline_record_what_is_between_them(tmp_path):
    text = """
hvd.init()
hvd.allreduce(torch.ones(3), name="before")
hvd.start_timeline("trace.json", mark_cycles=True)
hvd.allreduce(torch.ones(3), name="inside")
hvd.broadcast(torch.ones(3), 0, name="too")
train()
hvd.stop_timeline()
hvd.allreduce(torch.ones(3), name="after")
hvd.start_timeline("second")
hvd.barrier()
hvd.shutdown()
"""
    job = run_script(2, TRAINING + text, cwd=tmp_path)
    assert job.code == 0, job.output
    for rank in range(2):
        names = begun(tmp_path / f"trace.{rank}.json")
        assert names[:2] == ["allreduce[inside]", "broadcast[too]"]
        assert len(names) > 2  # the training's
        assert not any("after" in name or "before" in name for name in names)
        assert len(begun(tmp_path / f"second.{rank}.json")) == 1


@pytest.mark.at_length
def test_horovod_timeline_records_from_the_start(tmp_path):
    text = 'hvd.init()\nhvd.allreduce(torch.ones(5), name="w")\ntrain()\n'
    environment = {"HOROVOD_TIMELINE": str(tmp_path / "all.json")}
    job = run_script(2, TRAINING + text, cwd=tmp_path, env=environment)
    assert job.code == 0, job.output
    for rank in range(2):
        assert "allreduce[w]" in begun(tmp_path / f"all.{rank}.json")
        outcomes = [
            e["args"]["outcome"]
            for e in events(tmp_path / f"all.{rank}.json")[1:]
            if e["ph"] == "E"
        ]
        assert outcomes
        assert set(outcomes) == {"done"}


LATE = """
hvd.init()
hvd.barrier()
if hvd.rank() in (1, 2):
    time.sleep({seconds})  # a slow loader
assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name="layer3.weight")[0] == 3
print("went on", flush=True)
"""


@pytest.mark.at_length
def test_a_stall_is_warned_of_by_tensor_and_missing_ranks_and_training_goes_on(tmp_path):
    environment = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
    job = run_script(3, TRAINING + LATE.format(seconds=2), cwd=tmp_path, env=environment)
    assert job.code == 0, job.output
    assert "allreduce[layer3.weight]: rank 0 has waited" in job.output
    assert "for ranks 1, 2, which did not answer or did not enter it" in job.output
    assert job.output.count("went on") == 3


@pytest.mark.at_length
def test_a_stall_that_is_not_to_be_warned_of_is_not(tmp_path):
    environment = {"HOROVOD_STALL_CHECK_DISABLE": "1", "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5"}
    job = run_script(3, TRAINING + LATE.format(seconds=1.5), cwd=tmp_path, env=environment)
    assert job.code == 0, job.output
    assert "has waited" not in job.output


def test_a_stall_ends_after_its_deadline_and_names_who_is_missing(tmp_path):
    environment = {
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "0.5",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "4",
    }
    job = run_script(2, TRAINING + LATE.format(seconds=600), cwd=tmp_path, env=environment)
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "CommTimeoutError: allreduce[layer3.weight]: rank 0 has waited" in job.output
    assert "for rank 1, which did not answer or did not enter it" in job.output
    assert "went on" not in job.output
