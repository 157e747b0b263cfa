"""`ringcomm bench ps`: its command line, what is right, what is a figure and what is a goal."""

import dataclasses
import importlib.util
import json
import os
import time

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.launch import cli
from ringcomm.launch.bench.ps import report
from ringcomm.launch.bench.ps.cases import CASES, PUSH, Case, count_wrong, gradient, key_sets
from ringcomm.launch.bench.ps.goals import judge
from ringcomm.launch.bench.ps.options import parse
from ringcomm.launch.bench.ps.report import Report, Row, Step, summarize
from ringcomm.launch.bench.ps.work import Work, cpu_s_of

SMALL = Case("small", "4 x 2", (4, 2), n_sets=3)


def row(op="push", case="1K", engine="ringcomm", **found):
    return Row(op, case, engine, **{"wrong": 0, "calls": 9, **TIMES, **found})


TIMES = {"p50_us": 20.0, "p95_us": 30.0, "clients_us": 16.0, "server_us": 10.0}


# --- the command line ---------------------------------------------------------------------------
def test_all_cases_of_ringcomm_alone_are_the_default():
    wanted = parse([])
    assert wanted.cases == tuple(CASES.values())
    assert (wanted.against, wanted.has_step, wanted.json) == ((), False, None)
    assert parse(["--cases", "sparse", "--sets", "2"]).cases[0].n_rows == 20_000


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--cases", "2K"], "'2K' is none of 1K, 64K, 4M, sparse"),
        (["--against", "ps-lite"], "'ps-lite' is none of torch-rpc, torch-rpc-uv"),
        (["--cases", "none"], "without --step"),
        (["--rounds", "0"], "no number above 0"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--sizes", "1K"], "unrecognized arguments: --sizes"),
    ],
)
def test_a_wrong_command_line_is_refused_before_mpi_starts(argv, named, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "ps", *argv])
    assert caught.value.code == 2
    assert named in capsys.readouterr().err
    assert not rc.is_initialized()


@pytest.mark.parametrize("option", [["--against", "torch-rpc"], ["--step"]])
def test_what_needs_torch_is_refused_at_once_without_it(option, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "ps", *option]) == 2
    text = capsys.readouterr().err
    assert text == (
        f"ringcomm bench: {' '.join(option)} needs torch: pip install 'ringcomm[torch]'\n"
    )
    assert not rc.is_initialized()


# --- right answers ------------------------------------------------------------------------------
class Numpy:
    """A server of one client, in its own memory; it may lose a push, or do one twice."""

    def __init__(self, times=lambda number: 1):
        self.times = times

    def bind(self, case, x, keys):
        self.table = np.zeros((case.n_rows, *case.shape[1:]), np.float32)
        self.done = 0

        def push(number):
            self.table[keys[number]] += x * self.times(self.done)
            self.done += 1

        return push, lambda number: self.table[keys[number]]


def test_sets_of_keys_are_the_same_everywhere_and_share_none():
    sets = key_sets(SMALL)
    assert [len(keys) for keys in sets] == [4, 4, 4]
    assert sorted(np.concatenate(sets)) == list(range(12))
    assert all(np.array_equal(a, b) for a, b in zip(sets, key_sets(SMALL), strict=True))


@pytest.mark.parametrize(
    ("times", "is_right"),
    [
        (lambda number: 1, True),
        (lambda number: number != 5, False),
        (lambda number: 1 + (number == 5), False),
    ],
    ids=["once each", "one lost", "one twice"],
)
def test_values_are_right_if_each_push_counts_once(times, is_right):
    work = Work(Numpy(times), SMALL)
    turn = work.run(PUSH, 7)
    assert len(turn.times_s) == 7
    assert work.n_pushes == [3, 2, 2]
    assert (work.count_wrong(work.n_pushes) == 0) is is_right


def test_elements_are_counted_that_differ_or_are_not_there():
    right = gradient(SMALL) * 1000
    assert count_wrong(SMALL, right, 1000) == 0
    assert count_wrong(SMALL, right, 999) == 8
    assert count_wrong(SMALL, right[1:], 1000) == 8


# --- times --------------------------------------------------------------------------------------
def test_times_are_of_all_calls_and_cpu_times_of_the_middle_round():
    times = [[[1e-6, 2e-6]] * 3, [[3e-6, 9e-6]] * 3]  # 2 workers, 3 rounds, 2 calls
    found = summarize(times, [[8e-6, 4e-6, 9e-6], [4e-6, 4e-6, 99e-6]], [40e-6, 2e-6, 4e-6])
    assert found == {
        "p50_us": pytest.approx(2),
        "p95_us": pytest.approx(9),
        "clients_us": pytest.approx(3),  # (8 + 4) / 4 calls
        "server_us": pytest.approx(1),
        "calls": 12,
    }


def test_the_clock_of_a_process_counts_its_work_and_not_its_waits():
    own = time.process_time()
    before = cpu_s_of(os.getpid())
    while time.process_time() - own < 0.05:
        pass
    worked = cpu_s_of(os.getpid()) - before
    assert worked == pytest.approx(time.process_time() - own, rel=0.2)


# --- goals --------------------------------------------------------------------------------------
def figures(*rows, step=None, workers=1):
    return {f.name: f for f in judge(rows, step, workers=workers)}


@pytest.mark.parametrize(("server_us", "is_met"), [(14.0, True), (14.1, False)])
def test_cpu_time_is_the_sum_of_client_and_server(server_us, is_met):
    figure = figures(row(server_us=server_us))["push 1 KB: CPU, us"]
    assert (figure.value, figure.at_most) == (16 + server_us, 30)
    assert figure.is_met is is_met


def test_goals_of_one_worker_are_not_asked_of_two():
    assert figures(row(), workers=2) == {}


@pytest.mark.parametrize(
    ("case", "cpu_goal", "time_goal"),
    [("1K", 0.1, 5), ("64K", 0.1, 5), ("4M", 0.5, None), ("sparse", None, None)],
)
def test_beside_torch_rpc_cpu_is_a_share_and_time_a_multiple(case, cpu_goal, time_goal):
    peer = row("pull", case, "torch-rpc", clients_us=100.0, server_us=30.0, p50_us=90.0)
    other = row("pull", case, "torch-rpc-uv", p50_us=1.0)  # has no goals
    found = figures(row("pull", case), other, peer, workers=4)
    title = CASES[case].title
    cpu, time_ = found[f"pull {title}: CPU / torch-rpc"], found[f"pull {title}: times faster"]
    assert (cpu.value, cpu.at_most) == (0.2, cpu_goal)
    assert (time_.value, time_.at_least) == (4.5, time_goal)
    assert len(found) == 2


def test_a_pull_is_held_against_the_memcpy_of_its_run():
    memcpy = row("pull", "4M", "memcpy", p50_us=100.0)
    figure = figures(row("pull", "4M", p50_us=151.0), memcpy)["pull 4 MB: time / memcpy"]
    assert (figure.value, figure.at_most, figure.is_met) == (1.51, 1.5, False)


@pytest.mark.parametrize(("workers", "goal"), [(2, 1.5), (4, None)])
def test_a_step_has_a_goal_with_two_workers(workers, goal):
    step = Step(20_000_000, ps_ms=130, ring_ms=100, ratio=1.3, is_equal=True)
    (figure,) = judge([], step, workers=workers)
    assert (figure.value, figure.at_most) == (1.3, goal)


# --- the table ----------------------------------------------------------------------------------
FOUND = Report(
    version="1", workers=1, cores=2, load=0.1, rounds=3, rows=[row()], step=None,
    figures=judge([row(), row("pull", server_us=20.0)], None, workers=1),
)  # fmt: skip


def test_goals_are_marked_and_counted():
    text = report.figure_lines(FOUND.figures)
    assert text[1] == "# goals: 1 of 2 met"
    assert [line.split()[-1] for line in text[2:]] == ["met", "!"]
    assert report.figure_lines([]) == []


def test_a_figure_without_a_goal_is_neither_met_nor_missed():
    told = judge([row(case="4M"), row(case="4M", engine="torch-rpc")], None, workers=2)
    text = report.figure_lines(told)
    assert text[1] == "# goals: 0 of 1 met"
    assert "met" not in text[3]


def test_the_preamble_says_what_speaks_against_trusting_it():
    text = report.preamble(dataclasses.replace(FOUND, workers=4, load=3.2))
    assert "4 workers" in text[0]
    assert "more ranks than cores" in text[1]
    assert "load average 3.2" in text[2]
    assert len(report.preamble(FOUND)) == 1


def test_json_has_what_the_table_has():
    told = json.loads(report.to_json(FOUND))
    assert told["rows"][0]["sum_us"] == 26
    assert [figure["is_met"] for figure in told["figures"]] == [True, False]
    assert report.line(FOUND.rows[0]).split()[-2:] == ["26.0", "0"]


def test_wrong_values_and_weights_make_a_run_wrong():
    step = Step(1, ps_ms=1, ring_ms=1, ratio=1, is_equal=False)
    assert FOUND.is_right
    assert not dataclasses.replace(FOUND, rows=[row(wrong=1)]).is_right
    assert not dataclasses.replace(FOUND, step=step).is_right
    assert "# WRONG" in report.step_lines(step)[-1]
