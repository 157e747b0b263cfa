"""`ringcomm bench` as a job of two ranks."""

import json

import pytest
from harness import run_job, run_script

from ringcomm.launch.bench.cases import COLLECTIVES

QUICK = ("--sizes", "8,12K", "--iterations", 2)
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
options = ["--sizes", "12K,900000G", "--iterations", "1", "--buffers", "private"]
sys.exit(cli.main(["bench", *options]))
"""


def bench(size, *arguments, cwd, **kwargs):
    return run_job(size, "-P", "-m", "ringcomm", "bench", *arguments, cwd=cwd, **kwargs)


def test_every_collective_is_right_and_timed_in_every_form_that_there_is(tmp_path):
    file = tmp_path / "found.json"
    job = bench(2, "--collective", "all", *QUICK, "--json", file, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "# wrong elements: 0" in job.output
    rows = json.loads(file.read_text())["rows"]
    assert all(row["wrong"] == 0 and 0 < row["call_p50_us"] <= row["p99_us"] for row in rows)
    found = {(row["collective"], row["engine"], row["in_place"]) for row in rows}
    assert found == {
        (name, engine, in_place)
        for name, how in COLLECTIVES.items()
        for engine in ("ringcomm", "memcpy")
        for in_place in (False, True)
        if (name, engine) != ("barrier", "memcpy")
        if not in_place or (how.has_in_place and engine != "memcpy")
    }


@pytest.mark.at_length
def test_16_bit_floats_and_averages_are_exact_in_every_mode(tmp_path):
    for mode in ("sync", "async", "named"):  # one job each would cost seconds
        job = bench(
            *(2, "--mode", mode, "--dtype", "float16,bfloat16,int8", "--op", "sum,average"),
            *("--collective", "allreduce,reduce_scatter", *QUICK),
            cwd=tmp_path,
        )
        assert job.code == 0, job.output


def test_a_wrong_result_is_shown_and_ends_with_1(tmp_path):
    job = run_script(2, WRONG, cwd=tmp_path)
    assert job.code == 1, job.output
    assert "# wrong elements: 1\n" in job.output
    assert job.output.count("are left out: MemAvailable") == 1
    line = next(line for line in job.output.splitlines() if line.endswith(" ringcomm"))
    assert line.split()[7] == "0"  # out of place is right, and timed
    assert line.split()[8:12] == ["-", "-", "-", "1"]


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_one_rank_is_told_to_bring_another(command, tmp_path):
    job = run_job(1, "-P", "-m", "ringcomm", command, cwd=tmp_path)
    assert job.code == 2, job.output
    assert "1 rank, and a collective needs two: ringcomm run -np 2 ringcomm" in job.output
