"""`ringcomm bench ps` as a job: a worker and a server."""

import json

import pytest
from harness import run_job, run_script

WRONG = """
import sys
from ringcomm import ps
from ringcomm.launch import cli

right, n = ps.Table.push, 0

def forgetful(table, x, **options):
    global n
    n += 1
    return right(table, x * (n != 5), **options)

ps.Table.push = forgetful
sys.exit(cli.main(["bench", "ps", "--cases", "1K", "--rounds", "1"]))
"""


def bench(size, *arguments, cwd):
    return run_job(size, "-P", "-m", "ringcomm", "bench", "ps", *arguments, cwd=cwd)


def test_every_operation_is_right_and_timed(tmp_path):
    file = tmp_path / "found.json"
    job = bench(2, "--rounds", 1, "--sets", 2, "--json", file, cwd=tmp_path)
    assert job.code == 0, job.output
    found = json.loads(file.read_text())
    rows = {(row["op"], row["case"], row["engine"]): row for row in found["rows"]}
    cases = ("1K", "64K", "4M", "sparse")
    ours = {(op, case, "ringcomm") for op in ("push", "pull") for case in cases}
    assert set(rows) == ours | {("pull", "4M", "memcpy")}
    for key, row in rows.items():
        assert row["wrong"] == 0, key
        assert 0 < row["p50_us"] <= row["p95_us"], key
        assert row["sum_us"] == pytest.approx(row["clients_us"] + row["server_us"]), key
        assert row["clients_us"] > 0, key
    for case in cases:  # the server's own work, by its own clock
        assert rows["push", case, "ringcomm"]["server_us"] > 0
    assert rows["pull", "4M", "memcpy"]["server_us"] == 0
    assert job.output.count("10k x 64   ringcomm") == 2
    assert len(found["figures"]) == 9  # 8 CPU times and the memcpy


def test_a_push_that_is_lost_ends_with_1(tmp_path):
    job = run_script(2, WRONG, cwd=tmp_path)
    assert job.code == 1, job.output
    rows = [line.split() for line in job.output.splitlines() if "1 KB       ringcomm" in line]
    assert [words[-1] for words in rows] == ["256", "256"]  # of the table's 256 elements


def test_one_rank_is_too_few_and_says_so(tmp_path):
    job = bench(1, cwd=tmp_path)
    assert job.code == 2, job.output
    lines = [line for line in job.output.splitlines() if line.startswith("ringcomm bench")]
    assert lines == [
        "ringcomm bench: ps: 1 rank, and it takes a worker and a server: "
        "mpirun -np 2 ringcomm bench ps"
    ]
