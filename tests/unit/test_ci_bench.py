"""ci/bench: what is compared with other libraries, and what is a goal."""

import dataclasses
import json
import os
import sys
import time
import types

import numpy as np
import pytest
from bench import compare_saved_runs, plot, ps
from bench.figure_and_goal import Figure, verdict
from bench.ps_workload import CASES, PUSH, Case, Work, cpu_s_of, key_sets

from ringcomm.errors import ConfigError
from ringcomm.launch.bench.table import BenchRow

K, M = 1 << 10, 1 << 20


# --- compare_saved_runs -------------------------------------------------------------------------
def row(engine="ringcomm", time_us=10.0, **changes):
    plain = BenchRow("allreduce", "sum", "float32", M, M // 4, engine, "private", True, 0, time_us)
    times = {} if time_us is None else {"call_p50_us": time_us, "p99_us": 2 * time_us}
    return dataclasses.replace(plain, **{**times, **changes})


def memcpy(time_us, **changes):
    return row("memcpy", time_us, in_place=False, **changes)


def run(*rows, **changes):
    facts = {"ringcomm_bench": 2, "size": 2, "hosts": 1, "mpi": "Open MPI", "is_mpi_default": False}
    return {**facts, **changes, "rows": list(rows)}


def figures(*runs):
    return {figure.name: figure for figure in compare_saved_runs.compare(runs)[0][2]}


def test_the_fastest_mpi_is_the_least_multiple_of_its_own_memcpy():
    # 300 / 100 = 3 beats 260 / 65 = 4 although it took longer.
    ours = run(row(time_us=60), row("native", 400), memcpy(100))
    slow_machine = run(row("native", 300), memcpy(100), mpi="MPICH 5", is_mpi_default=True)
    fast_machine = run(row("native", 260), memcpy(65))
    found = figures(ours, slow_machine, fast_machine)
    assert found["x MPI"].value == pytest.approx(5)
    assert found["/memcpy"].value == pytest.approx(0.6)
    assert (
        "[MPICH 5, defaults]"
        in compare_saved_runs.lines(compare_saved_runs.compare([ours, slow_machine]))[1]
    )


def test_at_1_kib_the_goal_is_a_difference_in_time():
    small = {"nbytes": K, "count": 256}
    ours = run(row(time_us=5.5, **small), row("native", 4.0, **small), memcpy(1.0, **small))
    figure = figures(ours)["us over MPI"]
    assert (figure.value, figure.at_most, figure.is_met) == (pytest.approx(1.5), 2, True)


def test_16_bit_floats_are_held_against_float32_of_the_same_run():
    half = {"dtype": "float16"}
    ours = run(row(time_us=20.0, **half), row(), memcpy(5.0), memcpy(5.0, **half))
    assert figures(ours)["/float32"] == Figure("/float32", 2.0, at_most=1.5)


def test_wrong_lines_and_other_rank_counts_are_not_compared():
    assert compare_saved_runs.compare([run(row(time_us=None, wrong=3), memcpy(5.0))]) == []
    four = run(row("native", 1.0), memcpy(5.0), size=4)
    assert "x MPI" not in figures(run(row(), memcpy(5.0)), four)


@pytest.mark.parametrize(
    ("nbytes", "size", "hosts", "is_registered", "asked"),
    [
        (M, 2, 1, True, {"x MPI": 5}),
        (64 * M, 4, 1, True, {"x MPI": 5, "/memcpy": 0.65}),
        (4 * M, 2, 1, False, {"x MPI": 1.3}),
        (2 * M, 2, 1, False, {"x MPI": 1}),
        (32 * K, 2, 1, True, {}),
        (16 * M, 16, 1, True, {"x MPI": 1, "x gloo": 1, "p99/p50": 5}),
        (16 * M, 16, 1, False, {}),
        (8 * M, 3, 3, False, {"x MPI": 2, "of link": 0.8}),
        (4 * M, 6, 3, True, {"x MPI": 2, "x gloo": 1.3}),
    ],
)
def test_goals_follow_size_ranks_hosts_and_buffers(nbytes, size, hosts, is_registered, asked):
    assert (
        compare_saved_runs.goals(nbytes, size=size, hosts=hosts, is_registered=is_registered)
        == asked
    )


def test_files_are_read_columns_are_apart_and_a_sentence_sums_up(tmp_path, capsys):
    found = run(row(time_us=123.5), row("native", 40.0), memcpy(1.0))
    found["rows"] = [dataclasses.asdict(each) for each in found["rows"]]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(found))
    assert compare_saved_runs.main([str(path)]) == 0
    text = capsys.readouterr().out.splitlines()
    assert "x MPI 0.32 >=1.4 !  " in text[1]
    assert text[-1] == "0 of 1 goals are met; 1 missed, marked with !."
    path.write_text('{"ringcomm_bench": 1, "rows": []}')
    for name in ("a.json", "b.json"):
        with pytest.raises(ConfigError, match=name):
            compare_saved_runs.main([str(tmp_path / name)])


def test_the_picture_has_a_line_per_engine_and_its_speedup(monkeypatch, tmp_path):
    class Panel:
        def __init__(self):
            self.lines = {}

        def loglog(self, x, y, *, label, **style):
            self.lines[label] = list(zip(x, y, strict=True))

        def set(self, **labels): ...
        def grid(self, *args, **kwargs): ...
        def legend(self): ...

    panels = np.array([[Panel(), Panel()]])
    figure = types.SimpleNamespace(
        subplots=lambda *args, **kwargs: panels, savefig=lambda path: path.write_text("drawn")
    )
    module = types.ModuleType("matplotlib.figure")
    module.Figure = lambda **kwargs: figure
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    rows = [
        row(time_us=80.0),
        row(time_us=90.0, in_place=False),
        row("native", 200.0),
        memcpy(40.0),
    ]
    rows.append(row(time_us=50.0, buffers="registered"))
    plot.draw(run() | {"rows": [dataclasses.asdict(each) for each in rows]}, tmp_path / "x.png")
    left, right = (panel.lines for panel in panels[0])
    assert left == {
        "ringcomm reg": [(M, 50)],
        "ringcomm": [(M, 80)],  # in place, not 90
        "native": [(M, 200)],
        "memcpy": [(M, 40)],
    }
    assert right["ringcomm reg"] == [(M, 4)]
    assert (tmp_path / "x.png").read_text() == "drawn"


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
