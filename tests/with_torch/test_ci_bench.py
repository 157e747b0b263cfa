"""ci/bench as jobs: calls in every way, steps of training, and a parameter server."""

import json
from pathlib import Path

import pytest
from bench.calls import WAYS
from bench.step import WORKLOADS
from harness import run_job, run_script

from ringcomm.launch.bench import CALLS, COPIES, REDUCTIONS

BENCH = Path(__file__).parents[2] / "ci" / "bench"
WRONG = f"""
import sys
sys.path.append({str(BENCH.parent)!r})
import ringcomm.torch as hvd
from bench import step

right = hvd.DistributedOptimizer
hvd.DistributedOptimizer = lambda *args: right(*args, op=hvd.Sum)
sys.exit(step.main(["--model", "transformer", "--steps", "1", "--batch", "1"]))
"""
LOST = f"""
import sys
sys.path.append({str(BENCH.parent)!r})
from ringcomm import ps
from bench import ps as bench

right, n = ps.Table.push, 0

def forgetful(table, x, **options):
    global n
    n += 1
    return right(table, x * (n != 5), **options)

ps.Table.push = forgetful
sys.exit(bench.main(["--cases", "1K", "--rounds", "1"]))
"""


def bench(*arguments, cwd, size=2):
    return run_job(size, BENCH, *arguments, cwd=cwd)


@pytest.mark.at_length
def test_every_way_is_right_wherever_it_has_the_call(tmp_path):
    file = tmp_path / "found.json"
    options = ["--sizes", "8,12K", "--seconds", 0, "--json", file]
    job = bench("calls", *options, cwd=tmp_path)
    assert job.code == 0, job.output
    rows = json.loads(file.read_text())["rows"]
    assert all(row["wrong"] == 0 and row["us"] > 0 for row in rows)
    found = {way: {row["call"] for row in rows if row["way"] == way} for way in WAYS}
    collectives = {"barrier", *REDUCTIONS, *COPIES}
    of_horovod = {"allreduce_", "allreduce", "reduce_scatter", "broadcast_", "broadcast"}
    of_torch = {"allreduce_", "reduce_", "reduce_scatter", "broadcast_", "gather", "scatter"}
    of_torch |= {"barrier", "isend", "pingpong", "allgather", "alltoall"}
    assert found == {
        "ringcomm": set(CALLS),
        "rc.zeros": set(REDUCTIONS),
        "named": collectives,
        "grouped": {"allreduce_", "allreduce", "reduce_scatter", "allgather"},
        "hvd": of_horovod | {"barrier", "allgather", "alltoall"},
        "dist": of_torch,
        "mpi4py": set(CALLS) - {"memcpy"},
        "gloo": of_torch,
    }


@pytest.mark.at_length
@pytest.mark.parametrize(("model", "millions"), [("mlp", 20), ("transformer", 7)])
def test_the_models_have_the_size_that_is_promised_and_can_be_trained(model, millions):
    workload = WORKLOADS[model]
    made = workload.make()
    assert round(sum(p.numel() for p in made.parameters()) / 1e6) == millions
    workload.loss(made, workload.batch(1)).backward()
    assert all(p.grad is not None for p in made.parameters())


@pytest.mark.at_length
@pytest.mark.parametrize(("size", "ways"), [(2, "ring,ddp,hook,gloo"), (3, "ring,ps")])
def test_a_step_is_timed_in_every_way_once_gradients_agree(size, ways, tmp_path):
    file = tmp_path / "found.json"
    options = ["--model", "transformer", "--ways", ways, "--steps", 2, "--batch", 1, "--json", file]
    job = bench("step", *options, cwd=tmp_path, size=size)
    assert job.code == 0, job.output
    found = json.loads(file.read_text())
    assert found["is_equal"]
    assert found["difference"] < 1e-5
    assert [line["name"] for line in found["lines"]] == ["alone", *ways.split(",")]
    assert all(line["step_ms"] > 0 for line in found["lines"])
    assert found["lines"][0]["exposed_ms"] == 0


@pytest.mark.at_length
def test_gradients_that_differ_from_ddps_end_with_1_and_no_times(tmp_path):
    job = run_script(2, WRONG, cwd=tmp_path)
    assert job.code == 1, job.output
    assert "# WRONG" in job.output
    assert "step p50" not in job.output


@pytest.mark.at_length
def test_torch_rpc_does_what_the_parameter_server_does(tmp_path):
    file = tmp_path / "found.json"
    options = ["--sets", 1, "--rounds", 1, "--against", "torch-rpc", "--json", file]
    job = bench("ps", *options, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "eof" not in job.output  # all of its processes left in order
    found = json.loads(file.read_text())
    rows = {(row["op"], row["case"], row["engine"]): row for row in found["rows"]}
    in_place = {(op, "sparse", "in place") for op in ("push", "pull")}
    assert set(rows) == {("pull", "4M", "memcpy")} | in_place | {
        (op, case, engine)
        for op in ("push", "pull")
        for case in ("1K", "64K", "4M", "sparse")
        for engine in ("ringcomm", "torch-rpc")
    }
    for key, row in rows.items():
        assert row["wrong"] == 0, key
        assert 0 < row["p50_us"] <= row["p95_us"], key
        assert row["sum_us"] == pytest.approx(row["clients_us"] + row["server_us"]), key
        assert row["server_us"] > 0 or key[0] == "pull", key
    assert len(found["figures"]) == 9 + 16  # 8 CPU times and the memcpy; two beside torch-rpc


@pytest.mark.at_length
def test_pulls_of_many_tables_are_timed_in_three_ways(tmp_path):
    file = tmp_path / "found.json"
    options = ["--tables", 3, "--keys", 50, "--servers", 1, "--rounds", 2, "--json", file]
    job = bench("pull_many", *options, cwd=tmp_path)
    assert job.code == 0, job.output
    found = json.loads(file.read_text())
    assert found["wrong"] == 0
    assert list(found["median_ms"]) == ["one by one", "issued together", "pull_many"]
    assert all(each > 0 for each in found["median_ms"].values())


@pytest.mark.at_length
def test_a_push_that_is_lost_ends_with_1(tmp_path):
    job = run_script(2, LOST, cwd=tmp_path)
    assert job.code == 1, job.output
    rows = [line.split() for line in job.output.splitlines() if "1 KB       ringcomm" in line]
    assert [words[-1] for words in rows] == ["256", "256"]  # of the table's 256 elements
