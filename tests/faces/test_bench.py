"""What `ringcomm bench` needs torch for: gloo, and a step of training."""

import json

import pytest
from harness import run_job, run_script

from ringcomm.torch.models import WORKLOADS

WRONG = """
import sys
import ringcomm as rc
import ringcomm.torch.bench as bench
from ringcomm.torch.optimizer import DistributedOptimizer

def forgets_to_divide(*args):
    return DistributedOptimizer(*args, op=rc.SUM)


bench.DistributedOptimizer = forgets_to_divide
sys.exit(bench.main(["--model", "transformer", "--steps", "1", "--batch", "1"]))
"""


def bench(*arguments, cwd):
    return run_job(2, "-P", "-m", "ringcomm", "bench", *arguments, cwd=cwd)


@pytest.mark.at_length
def test_gloo_is_right_wherever_it_takes_part(tmp_path):
    file = tmp_path / "found.json"
    job = bench(
        *("--collective", "all", "--dtype", "float32,bfloat16", "--op", "average"),
        *("--against", "gloo", "--sizes", "12K", "--iterations", 1, "--json", file),
        cwd=tmp_path,
    )
    assert job.code == 0, job.output
    rows = json.loads(file.read_text())["rows"]
    gloo = [row for row in rows if row["engine"] == "gloo"]
    private = [row for row in rows if row["buffers"] == "private"]
    assert len(gloo) == len([row for row in private if row["engine"] == "ringcomm"])
    assert all(row["time_us"] > 0 for row in gloo)


@pytest.mark.parametrize(("model", "millions"), [("mlp", 20), ("transformer", 7)])
def test_the_models_have_the_size_that_is_promised_and_can_be_trained(model, millions):
    workload = WORKLOADS[model]
    made = workload.make()
    assert round(sum(p.numel() for p in made.parameters()) / 1e6) == millions
    workload.loss(made, workload.batch(1)).backward()
    assert all(p.grad is not None for p in made.parameters())


@pytest.mark.at_length
def test_a_step_is_timed_in_three_ways_once_gradients_agree(tmp_path):
    file = tmp_path / "found.json"
    options = ["--model", "transformer", "--steps", 2, "--warmup", 0, "--batch", 1, "--json", file]
    job = bench("optimizer", *options, cwd=tmp_path)
    assert job.code == 0, job.output
    found = json.loads(file.read_text())
    assert found["is_equal"]
    assert found["difference"] < 1e-6
    assert [line["name"] for line in found["lines"]] == [
        "no communication",
        "ringcomm",
        "DDP over gloo",
    ]
    assert all(line["step_ms"] > 0 for line in found["lines"])
    assert found["lines"][0]["exposed_ms"] == 0


@pytest.mark.at_length
def test_gradients_that_differ_from_ddps_end_with_1_and_no_times(tmp_path):
    job = run_script(2, WRONG, cwd=tmp_path)
    assert job.code == 1, job.output
    assert "# WRONG" in job.output
    assert "step p50" not in job.output


@pytest.mark.at_length
def test_torch_rpc_and_the_ring_do_what_the_parameter_server_does(tmp_path):
    file = tmp_path / "found.json"
    options = ["--cases", "1K,sparse", "--sets", 1, "--rounds", 1, "--against", "torch-rpc"]
    job = bench("ps", *options, "--step", "--steps", 1, "--json", file, cwd=tmp_path)
    assert job.code == 0, job.output
    found = json.loads(file.read_text())
    peer = [row for row in found["rows"] if row["engine"] == "torch-rpc"]
    assert [(row["op"], row["case"]) for row in peer] == [
        (op, case) for case in ("1K", "sparse") for op in ("push", "pull")
    ]
    assert all(row["wrong"] == 0 and row["server_us"] > 0 for row in peer)
    assert "push 1 KB: CPU / torch-rpc" in job.output
    assert "eof" not in job.output  # all of its processes left in order
    step = found["step"]
    assert step["is_equal"]
    assert step["ratio"] == pytest.approx(step["ps_ms"] / step["ring_ms"])
