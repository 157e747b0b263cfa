"""ci/bench: what is compared with other libraries, and what is a goal."""

import json
import os
import time

import numpy as np
import pytest
from bench import calls_table, ps
from bench.calls_table import limit_us
from bench.figure_and_goal import Figure, verdict
from bench.ps_workload import CASES, PUSH, Case, Work, cpu_s_of, key_sets

from ringcomm.errors import ConfigError

K, M = 1 << 10, 1 << 20
NO_GOAL = calls_table.NO_GOAL


# --- calls_table --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "way", "nbytes", "changes", "limit"),
    [
        ("barrier", "ringcomm", 0, {"mpi_us": 2.0}, 5),
        ("sendrecv", "ringcomm", 4 * K, {"mpi_us": 10.0}, 15),
        ("sendrecv", "ringcomm", 8 * K, {"mpi_us": 10.0}, 11),
        ("pingpong", "ringcomm", 8, {"mpi_us": 2.0, "size": 4}, 7.5),
        ("allreduce_", "ringcomm", K, {"mpi_us": 4.0}, 6),
        ("allreduce_", "named", K, {"mpi_us": 4.0}, 9),
        ("allreduce_", "dist", K, {"mpi_us": 4.0}, 16),
        ("allreduce_", "hvd", K, {"mpi_us": 4.0, "size": 4}, 19),
        ("allreduce_", "grouped", K, {"mpi_us": 4.0}, NO_GOAL),
        ("allreduce_", "rc.zeros", K, {"mpi_us": 4.0}, 6),
        ("allreduce_", "ringcomm", 64 * K, {"mpi_us": 20.0}, 22),
        ("allreduce_", "rc.zeros", 64 * K, {"mpi_us": 20.0}, 10),
        ("broadcast_", "ringcomm", M, {"mpi_us": 50.0}, 66),
        ("broadcast_", "ringcomm", M, {"mpi_us": 100.0}, 110),
        ("scatter", "ringcomm", M, {"mpi_us": 10.0}, 36),
        ("allreduce_", "ringcomm", K, {"mpi_us": 40.0, "hosts": 2}, 70),
        ("allreduce", "ringcomm", M, {"mpi_us": 40.0, "hosts": 2}, 30),
        ("gather", "ringcomm", M, {"mpi_us": 40.0, "hosts": 2}, NO_GOAL),
    ],
)
def test_goals_follow_the_call_the_way_the_size_and_the_place(call, way, nbytes, changes, limit):
    facts = {"size": 2, "hosts": 1, "cores": 2, "memcpy_us": 50.0} | changes
    assert limit_us(call, way, nbytes, **facts) == pytest.approx(limit)


def report(*rows, mpi="Open MPI v5", size=2, hosts=1, link_gbps=None):
    names = ("call", "way", "nbytes", "us")
    return {
        "ringcomm_bench": 3, "mpi": mpi, "size": size, "hosts": hosts, "cores": 2,
        "link_gbps": link_gbps, "rows": [dict(zip(names, row, strict=True)) for row in rows],
    }  # fmt: skip


def sums(ours, theirs, **facts):
    rows = [("allreduce_", "ringcomm", K, ours), ("allreduce_", "mpi4py", K, theirs)]
    return report(*rows, **facts)


def rows_of(*reports):
    return [line for line in calls_table.table(reports) if line.startswith("| np")]


def test_a_cell_has_the_median_times_and_a_mark_for_each_goal_that_is_missed():
    runs = [sums(5.9, 4.0), sums(90.0, 80.0), sums(6.1, 4.2)]
    assert rows_of(*runs) == ["| np 2 | `allreduce_` |  | 6.1 / 4.2 |  |  |  |"]
    missed = [*runs[1:], sums(7.0, 4.0), sums(7.0, 4.0), sums(7.0, 4.0)]
    assert rows_of(*missed) == ["| np 2 | `allreduce_` |  | 7.0 / 4.0 ! |  |  |  |"]
    assert list(calls_table.table(missed))[-1].startswith("1 of 1 figures with a goal miss it")


def test_a_busy_machine_is_judged_by_the_fastest_batch():
    runs = [sums(50.0, 40.0), sums(60.0, 40.0)]
    for run, times in zip(runs, ((5.0, 9.0), (70.0, 4.0)), strict=True):
        for row, least_us in zip(run["rows"], times, strict=True):
            row["least_us"] = least_us
    assert "| np 2 | `allreduce_` |  | 5.0 / 4.0 |  |  |  |" in calls_table.table(runs, "least_us")


def test_each_mpi_is_beside_ours_of_its_own_runs():
    intel = sums(9.0, 1.0, mpi="Intel(R) MPI Library 2021")
    runs = [sums(5.0, 4.0), sums(50.0, 7.0, mpi="MPICH Version: 5"), intel]
    assert rows_of(*runs) == ["| np 2 | `allreduce_` |  | 5.0 / 4.0, 7.0, 1.0 ! |  |  |  |"]


def test_ways_have_rows_of_their_own_and_a_barrier_has_no_size():
    rows = [
        ("barrier", "ringcomm", 0, 3.0),
        ("barrier", "mpi4py", 0, 1.5),
        ("barrier", "dist", 0, 30.0),
        ("allreduce_", "gloo", K, 900.0),
        ("allreduce_", "mpi4py", K, 4.0),
        ("allreduce_", "rc.zeros", K, None),  # it was wrong
    ]
    assert rows_of(report(*rows)) == [
        "| np 2 | `barrier` | 3.0 / 1.5 |  |  |  |  |",
        "| np 2 | `barrier, dist` | 30 ! |  |  |  |  |",
        "| np 2 | `allreduce_, gloo` |  | 900 |  |  |  |",
    ]


def test_a_slow_link_is_judged_by_the_bytes_that_must_cross_it():
    us = M / 0.025 / 1e3  # all that must leave a host of two, at 25 MB/s
    run = report(("allreduce_", "ringcomm", M, us / 0.9), mpi="Open MPI", hosts=2, link_gbps=0.025)
    lines = list(calls_table.table([sums(5.0, 4.0), run]))
    text = "- 2 hosts at 200 Mbit/s: allreduce_ of 1 MiB uses 90 % of the link (goal 95%) !"
    assert text in lines


def test_jobs_are_started_for_each_mpi_with_gloo_alone(monkeypatch, tmp_path):
    (tmp_path / "open/bin").mkdir(parents=True)
    (tmp_path / "open/bin/ompi_info").touch()
    started = []

    def run(command, *, env, **_):
        assert env["PATH"].startswith(str(tmp_path))
        started.append(" ".join(command).replace(str(tmp_path), ""))
        file = command[command.index("--json") + 1]
        with open(file, "w") as out:
            json.dump(sums(5.0, 4.0), out)
        return type("Done", (), {"returncode": 0})

    monkeypatch.setattr(calls_table.subprocess, "run", run)
    monkeypatch.setattr(calls_table.os, "cpu_count", lambda: 2)
    venvs = f"{tmp_path / 'open'},{tmp_path / 'mpich'}"
    argv = [str(tmp_path / "found"), "--run", "--venvs", venvs, "--times", "1"]
    assert calls_table.main(argv) == 0
    ways = [line.partition("--ways ")[2].partition(" --json")[0] for line in started]
    plain = "ringcomm,rc.zeros,mpi4py"
    assert ways == [f"{plain},named,grouped,hvd,dist", "gloo", plain, plain, plain]
    assert [line.partition(" /open/bin/python")[0] for line in started[:3]] == [
        "/open/bin/mpirun -np 2",
        "/open/bin/mpirun -np 2",
        "/open/bin/mpirun --oversubscribe -np 4",
    ]
    assert started[3].startswith("/mpich/bin/mpirun -np 2 /mpich/bin/python")
    assert len(list((tmp_path / "found").iterdir())) == 5


def test_other_files_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no results: add --run"):
        calls_table.main([str(tmp_path)])
    (tmp_path / "a.json").write_text('{"ringcomm_bench": 2, "rows": []}')
    with pytest.raises(ConfigError, match=r"a\.json is no result"):
        calls_table.main([str(tmp_path)])


# --- the parameter server -----------------------------------------------------------------------
SMALL = Case("small", "4 x 2", (4, 2), n_sets=3)


class Numpy:
    """A server of one client, in its own memory; it may lose a push, or do one twice."""

    def __init__(self, times):
        self.times = times

    def bind(self, case, x, keys):
        self.table = np.zeros((case.n_rows, *case.shape[1:]), np.float32)
        self.done = 0

        def push(number):
            self.table[keys[number]] += x * self.times(self.done)
            self.done += 1

        return push, lambda number: self.table[keys[number]]


@pytest.mark.parametrize(
    ("times", "n_wrong"),
    [
        (lambda number: 1, 0),
        (lambda number: number != 5, 8),
        (lambda number: 1 + (number == 5), 8),
    ],
    ids=["once each", "one lost", "one twice"],
)
def test_values_are_right_if_each_push_counts_once(times, n_wrong):
    sets = key_sets(SMALL)
    assert sorted(np.concatenate(sets)) == list(range(12))
    assert all(np.array_equal(a, b) for a, b in zip(sets, key_sets(SMALL), strict=True))
    work = Work(Numpy(times), SMALL)
    times_s, _ = work.run(PUSH, 7)
    assert len(times_s) == 7
    assert work.n_pushes == [3, 2, 2]
    assert work.count_wrong(work.n_pushes) == n_wrong


def test_the_clock_of_a_process_counts_its_work_and_not_its_waits():
    own = time.process_time()
    before = cpu_s_of(os.getpid())
    while time.process_time() - own < 0.05:
        pass
    worked = cpu_s_of(os.getpid()) - before
    assert worked == pytest.approx(time.process_time() - own, rel=0.2)


def pulls(case, engine, **found):
    plain = {"op": "pull", "case": case, "engine": engine, "p50_us": 20.0, "sum_us": 26.0}
    return plain | found


@pytest.mark.parametrize(
    ("case", "cpu_goal", "time_goal"),
    [("1K", 0.1, 5), ("64K", 0.1, 5), ("4M", 0.5, None), ("sparse", None, None)],
)
def test_beside_torch_rpc_cpu_is_a_share_and_time_a_multiple(case, cpu_goal, time_goal):
    peer = pulls(case, "torch-rpc", sum_us=130.0, p50_us=90.0)
    other = pulls(case, "torch-rpc-uv", p50_us=1.0)  # has no goals
    engine = ps.IN_PLACE if case == "sparse" else "ringcomm"
    cpu, times = ps.figures([pulls(case, engine), other, peer], workers=4)
    name = f"pull {CASES[case].title}"
    assert cpu == Figure(f"{name}: CPU / torch-rpc", 0.2, at_most=cpu_goal)
    assert times == Figure(f"{name}: times faster", 4.5, at_least=time_goal)


def test_one_worker_has_goals_for_its_cpu_time_and_memcpy():
    rows = [pulls("4M", "ringcomm", p50_us=151.0), pulls("4M", "memcpy", p50_us=100.0)]
    cpu, time_ = ps.figures(rows, workers=1)
    assert (cpu.value, cpu.at_most, cpu.is_met) == (26, 554, True)
    assert (time_.value, time_.at_most, time_.is_met) == (1.51, 1.5, False)
    assert verdict([cpu, time_]) == "1 of 2 goals are met; 1 missed, marked with !."
    assert ps.figures(rows, workers=2) == []
