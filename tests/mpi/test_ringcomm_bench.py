"""`ringcomm bench` as a job of two ranks."""

import json

import pytest
from harness import run_job, run_script

from ringcomm.launch.bench import CALLS, REDUCTIONS

QUICK = ("--sizes", "8,12K", "--seconds", 0)
WRONG = """
import sys
import ringcomm as rc
from ringcomm.launch import cli

right = rc.allreduce_

def off_by_one_on_rank_1(x, *args):
    right(x, *args)
    x[-1] += rc.rank()
    return x

rc.allreduce_ = off_by_one_on_rank_1
options = ["allreduce_", "allreduce", "--sizes", "12K,900000G", "--seconds", "0"]
sys.exit(cli.main(["bench", *options]))
"""


def bench(size, *arguments, cwd, **kwargs):
    return run_job(size, "-P", "-m", "ringcomm", "bench", *arguments, cwd=cwd, **kwargs)


def test_all_calls_are_shown_right_and_beside_mpi4pys_if_that_is_asked(tmp_path):
    file = tmp_path / "found.json"
    job = bench(2, "--mpi4py", *QUICK, "--json", file, cwd=tmp_path)
    assert job.code == 0, job.output
    lines = [line.split() for line in job.output.splitlines()]
    assert [words[0] for words in lines if words and words[0] in CALLS] == list(CALLS)
    assert ["8", "B", "12", "KiB"] in lines
    rows = json.loads(file.read_text())["rows"]
    assert all(row["wrong"] == 0 and row["us"] > 0 for row in rows)
    found = {(row["call"], row["way"], row["nbytes"]) for row in rows}
    sized = set(CALLS) - {"barrier"}
    assert found == (
        {("barrier", way, 0) for way in ("ringcomm", "mpi4py")}
        | {(call, "ringcomm", n) for call in sized for n in (8, 12 << 10)}
        | {(call, "mpi4py", n) for call in sized - {"memcpy"} for n in (8, 12 << 10)}
        | {("allreduce_", "rc.zeros", n) for n in (8, 12 << 10)}
    )


@pytest.mark.at_length
def test_16_bit_floats_are_right_and_mpi_reduces_none(tmp_path):
    for dtype in ("float16", "bfloat16"):
        file = tmp_path / "found.json"
        job = bench(2, "--mpi4py", "--dtype", dtype, *QUICK, "--json", file, cwd=tmp_path)
        assert job.code == 0, job.output
        rows = json.loads(file.read_text())["rows"]
        assert {row["call"] for row in rows if row["way"] == "mpi4py"} == (
            set(CALLS) - set(REDUCTIONS) - {"memcpy"}
        )


def test_a_wrong_result_is_shown_and_ends_with_1(tmp_path):
    job = run_script(2, WRONG, cwd=tmp_path)
    assert job.code == 1, job.output
    assert "WRONG: 2 elements of the results above" in job.output
    assert job.output.count("are left out: MemAvailable") == 1
    lines = [line.split() for line in job.output.splitlines()]
    assert ["allreduce_", "WRONG"] in lines
    assert ["rc.zeros", "WRONG"] in lines
    figure = next(words[1] for words in lines if words[:1] == ["allreduce"])
    assert float(figure.replace(",", "")) > 0  # right, and timed


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_one_rank_is_told_to_bring_another(command, tmp_path):
    job = run_job(1, "-P", "-m", "ringcomm", command, cwd=tmp_path)
    assert job.code == 2, job.output
    assert "1 rank, and a " in job.output
    assert f"needs two: ringcomm {command} -np 2" in job.output
