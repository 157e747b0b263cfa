"""`ringcomm bench`: sizes, bandwidths, right answers, and what it does with wrong ones."""

import dataclasses
import json
import re
import sys
import types

import numpy as np
import pytest

import ringcomm as rc
from ringcomm.errors import ConfigError
from ringcomm.launch import cli
from ringcomm.launch.bench import command, compare, pattern, plot, runner, table
from ringcomm.launch.bench.bandwidth import COLLECTIVES, bus_factor, total_count, wire_bytes
from ringcomm.launch.bench.case import Case, make_case
from ringcomm.launch.bench.engines import MemcpyEngine, RingcommEngine
from ringcomm.launch.bench.goals import Goal, goal
from ringcomm.launch.bench.options import parse
from ringcomm.launch.bench.report import Report, Row, from_json, to_json
from ringcomm.launch.bench.sizes import cap, parse_bytes, parse_sizes, show_bytes
from ringcomm.launch.bench.statistics import (
    batches_within,
    calls_per_batch,
    percentile,
    summarize,
)

F32 = np.dtype("float32")
K, M = 1 << 10, 1 << 20


# --- sizes --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("8", 8), ("64K", 64 * K), ("64kib", 64 * K), ("1MB", M), ("2G", 2 << 30)],
)
def test_a_size_is_read_in_powers_of_1024(text, nbytes):
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:64", (8, 16, 32, 64)),
        ("1K:20K:4", (K, 4 * K, 16 * K)),
        ("1M,8,8:16", (8, 16, M)),
        ("7:7", (7,)),
    ],
)
def test_ranges_and_lists_become_rising_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "0", "-8", "1T", "8:4", "8:64:1", "8:64:x", "1:2:3:4", "1.5K"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


def test_sizes_are_capped_but_one_stays():
    assert cap((8, 64, 512), 64) == (8, 64)
    assert cap((8, 64), 4) == (8,)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(12, "12 B"), (64 * K, "64 KiB"), (3 * M // 2, "1.5 MiB"), (1 << 30, "1 GiB")],
)
def test_sizes_are_shown_with_their_unit(nbytes, text):
    assert show_bytes(nbytes) == text


# --- bandwidth ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        ("allreduce", 1.5),
        ("reduce", 1),
        ("broadcast", 1),
        ("reduce_scatter", 0.75),
        ("allgather", 0.75),
        ("gather", 0.75),
        ("scatter", 0.75),
        ("alltoall", 0.75),
    ],
)
def test_bus_bandwidth_of_4_ranks_is_that_of_nccl_tests(collective, factor):
    assert bus_factor(collective, 4) == factor


@pytest.mark.parametrize(
    ("collective", "nbytes"),
    [
        ("allreduce", 400),
        ("reduce_scatter", 200),
        ("broadcast", 300),
        ("alltoall", 600),
        ("barrier", 0),
    ],
)
def test_what_must_cross_a_link_between_3_hosts_of_3_ranks(collective, nbytes):
    assert wire_bytes(collective, 300, hosts=3, ranks=9) == pytest.approx(nbytes)
    assert wire_bytes(collective, 300, hosts=1, ranks=9) == 0


@pytest.mark.parametrize(
    ("collective", "nbytes", "count"),
    [
        ("allreduce", 10, 2),
        ("allreduce", 1, 1),
        ("allgather", 10, 3),
        ("allgather", 40, 9),
        ("barrier", 9, 0),
    ],
)
def test_a_buffer_has_whole_parts_and_at_least_one_element_each(collective, nbytes, count):
    assert total_count(COLLECTIVES[collective], nbytes, 4, 3) == count


# --- statistics ---------------------------------------------------------------------------------
@pytest.mark.parametrize(("percent", "value"), [(50, 50), (99, 99), (100, 100), (0, 1)])
def test_a_percentile_is_one_of_the_values(percent, value):
    shuffled = np.roll(np.arange(1, 101), 37)
    assert percentile(shuffled, percent) == value


def test_below_100_values_the_99th_percentile_is_the_highest():
    assert percentile(np.array([3.0, 9.0, 1.0]), 99) == 9


def test_a_time_is_the_median_over_batches_of_the_slowest_rank():
    times = np.array([[[1, 1], [2, 4], [9, 9]], [[2, 2], [1, 1], [1, 1]]], float)
    summary = summarize(times)
    assert summary.time == 3  # of 2, 3 and 9
    assert summary.call_p50 == 2  # of 2, 2, 2, 4, 9, 9; a batch's ranks need not agree on which
    assert summary.call_p99 == 9
    assert summary.calls == 6


def test_batches_are_long_enough_for_the_clock_and_end_in_time():
    assert (calls_per_batch(3e-6), calls_per_batch(1e-9), calls_per_batch(2)) == (334, 1000, 1)
    assert (batches_within(2, 0.1), batches_within(2, 10), batches_within(9, 1e-3)) == (20, 5, 200)


# --- right answers ------------------------------------------------------------------------------
REDUCTIONS = [
    (dtype, op)
    for dtype in ["float16", "float32", "int8", "uint64", "bool", "complex64"]
    for op in ["sum", "average", "min", "max", "product"]
    if (dtype, op) not in [("bool", "average"), ("complex64", "min"), ("complex64", "max")]
]


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_the_expected_reduction_is_numpys(size, dtype, op):
    case = Case("allreduce", op, np.dtype(dtype), 20_000, size)
    sent = [np.empty(case.count, dtype) for _ in range(size)]
    for rank, x in enumerate(sent):
        pattern.fill(x, op, rank, size)
    wide = np.array(sent) if dtype == "bool" else np.array(sent, dtype=np.complex128)
    ufuncs = {"product": np.multiply, "min": np.minimum, "max": np.maximum}
    total = ufuncs.get(op, np.add).reduce(wide, axis=0) / (size if op == "average" else 1)
    assert np.array_equal(
        pattern.expected(case, 0), total.real.astype(dtype) if dtype[0] != "c" else total
    )


def sent_by(case, rank):
    x = np.empty(case.part if COLLECTIVES[case.collective].gives_part else case.count, case.dtype)
    pattern.fill(x, case.op, rank, case.size)
    return x


def test_every_collective_expects_what_its_name_says():
    size, count = 3, 3 * 5000
    cases = {name: make_case(name, "sum", F32, count * 4, size) for name in COLLECTIVES}
    sent = {name: [sent_by(case, r) for r in range(size)] for name, case in cases.items()}
    total = sum(sent["allreduce"])
    right = {
        "allreduce": [total] * 3,
        "reduce": [total, None, None],
        "reduce_scatter": np.split(total, 3),
        "allgather": [np.concatenate(sent["allgather"])] * 3,
        "gather": [np.concatenate(sent["gather"]), None, None],
        "broadcast": [sent["broadcast"][0]] * 3,
        "scatter": np.split(sent["scatter"][0], 3),
        "alltoall": [
            np.concatenate([np.split(x, 3)[r] for x in sent["alltoall"]]) for r in range(3)
        ],
    }
    for name, results in right.items():
        for rank, result in enumerate(results):
            expected = pattern.expected(cases[name], rank)
            assert (expected is None) == (result is None), name
            assert result is None or np.array_equal(expected, result), name


def test_no_rank_and_no_chunk_looks_like_another():
    parts = [sent_by(Case("allreduce", "sum", F32, 1 << 15, 3), rank) for rank in range(3)]
    chunks = [chunk.tobytes() for x in parts for chunk in np.split(x, 32)]
    assert len(set(chunks)) == len(chunks)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool", "float16"])
def test_wrong_elements_are_counted_bit_by_bit(dtype):
    right = np.ones(100, dtype)
    result = right.copy()
    result[[3, 99]] = 0
    assert pattern.count_wrong(right.copy(), right) == 0
    assert pattern.count_wrong(result, right) == 2
    assert pattern.count_wrong(right[1:], right) == 100
    assert pattern.count_wrong(None, right) == 100
    assert pattern.count_wrong(result, None) == 0


def test_a_negative_zero_is_wrong():
    assert pattern.count_wrong(np.array([-0.0]), np.array([0.0])) == 1


# --- the measurement, alone ---------------------------------------------------------------------
class Alone:
    """A Meeting of one rank."""

    rank, size, local_size, leaders = 0, 1, 1, [0]

    def __init__(self):
        self.barriers = 0

    def barrier(self):
        self.barriers += 1

    def highest(self, value):
        return value

    def total(self, value):
        return value

    def gather(self, value):
        return [value]


class Fake:
    """An engine of one rank that can go wrong from its n-th call on."""

    name = "fake"

    def __init__(self, wrong_from=None, does_spoil_input=False):
        self.calls = 0
        self.wrong_from = wrong_from
        self.does_spoil_input = does_spoil_input

    def refuses(self, collective, dtype, op):
        return None

    def bind(self, collective, op, send, recv):
        def call():
            self.calls += 1
            recv[...] = send
            if self.wrong_from is not None and self.calls >= self.wrong_from:
                recv[-1] += 1
            if self.does_spoil_input:
                send[0] += 1
            return recv

        return call


def measured(engine, *, forms=(True,), batches=2, **options):
    send, recv = np.empty((2, 4096), np.uint8)
    contender = runner.Contender(engine, "private", send, recv)
    effort = runner.Effort(seconds=1, batches=batches)
    case = make_case("allreduce", "sum", F32, 4096, 1)
    memcpy = runner.Contender(MemcpyEngine(), "private", send, recv)
    return runner.measure(case, [contender], memcpy, Alone(), effort, forms=forms, **options)


def test_a_sound_engine_is_timed_beside_the_memcpy():
    rows = measured(Fake(), forms=(False, True))
    assert [(row.engine, row.in_place) for row in rows] == [
        ("fake", False),
        ("fake", True),
        ("memcpy", False),
    ]
    for row in rows:
        assert row.wrong == 0
        assert row.time_us > 0  # a mean: one hiccup among 1000 calls lifts it above the p99
        assert 0 < row.call_p50_us <= row.p99_us
        assert row.calls > 2
        assert row.algbw_gbps == pytest.approx(4096 / row.time_us / 1e3)


def test_a_wrong_result_is_counted_and_not_timed():
    engine = Fake(wrong_from=1)
    row = measured(engine)[0]
    assert (row.wrong, row.time_us, engine.calls) == (1, None, 1)


def test_a_result_that_goes_wrong_while_timed_is_found():
    row = measured(Fake(wrong_from=3))[0]
    assert row.wrong == 1
    assert row.time_us is not None


def test_an_engine_that_spoils_its_input_is_wrong():
    assert measured(Fake(does_spoil_input=True), forms=(False,))[0].wrong == 1


def test_what_an_engine_refuses_is_left_out():
    engine = Fake()
    engine.refuses = lambda collective, dtype, op: "not today"
    assert [row.engine for row in measured(engine)] == ["memcpy"]


def test_engines_take_turns_and_each_batch_has_a_call_that_is_not_recorded():
    turns = []

    class Turn(Fake):
        def bind(self, collective, op, send, recv):
            call = super().bind(collective, op, send, recv)

            def noted():
                turns.append(self.name)
                return call()

            return noted

    engines = [Turn(), Turn()]
    engines[1].name = "other"
    send, recv = np.empty((2, 4096), np.uint8)
    lanes = [
        runner._lane(
            make_case("allreduce", "sum", F32, 4096, 1),
            runner.Contender(each, "private", send, recv),
            in_place=True,
        )
        for each in engines
    ]
    meeting = Alone()
    runner._time(lanes, meeting, runner.Effort(1, batches=2))
    n, m = (lane.calls for lane in lanes)
    pilot = 2 * (3 + 4)
    order = ["fake"] * (n + 1) + ["other"] * (m + 1)
    assert turns[pilot:] == order + order[::-1]
    assert [np.shape(lane.stamps_s) for lane in lanes] == [(2, n + 1), (2, m + 1)]
    assert meeting.barriers == 2 + 4


def test_the_yardstick_copies():
    send, recv = np.arange(5.0), np.zeros(5)
    MemcpyEngine().bind("allreduce", "sum", send, recv)()
    assert np.array_equal(send, recv)


@pytest.mark.parametrize(
    ("mode", "in_place", "name"),
    [
        ("sync", True, "allreduce_"),
        ("sync", False, "allreduce"),
        ("async", True, "allreduce_async_"),
        ("named", False, "allreduce_async"),
    ],
)
def test_the_mode_chooses_the_public_function(mode, in_place, name, monkeypatch):
    seen = {}

    class Handle:
        def wait(self):
            return "waited"

    def function(x, op, **options):
        seen.update(options, op=op)
        return "returned" if mode == "sync" else Handle()

    monkeypatch.setattr(rc, name, function)
    send, recv = np.zeros((2, 3))
    call = RingcommEngine(mode).bind("allreduce", "max", send, send if in_place else recv)
    assert call() == ("returned" if mode == "sync" else "waited")
    assert seen["op"] is rc.MAX
    assert (seen.get("name") is not None) == (mode == "named")


# --- reports ------------------------------------------------------------------------------------
def row(engine="ringcomm", time_us=10.0, **changes):
    plain = Row("allreduce", "sum", "float32", M, M // 4, engine, "private", True, 0)
    if time_us is not None:
        changes = {"time_us": time_us, "call_p50_us": time_us, "p99_us": 2 * time_us} | changes
    return dataclasses.replace(plain, **changes)


def report(*rows, **changes):
    plain = Report("0.1", 2, 1, 2, 0.1, "Open MPI 5.0.11", False, "sync", {}, None, list(rows))
    return dataclasses.replace(plain, **changes)


def memcpy(time_us, **changes):
    return row("memcpy", time_us, in_place=False, **changes)


def test_a_report_survives_json():
    full = report(row(), memcpy(3.5), settings={"RINGCOMM_TIMEOUT_S": "9"}, link_gbps=0.02)
    text = to_json(full)
    assert from_json(text, source="a.json") == full
    assert json.loads(text)["ringcomm_bench"] == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"ringcomm_bench": 1}', '{"ringcomm_bench": 99}']
)
def test_a_file_that_is_no_report_is_named(text):
    with pytest.raises(ConfigError, match=r"a\.json"):
        from_json(text, source="a.json")


def test_the_table_fits_120_columns_and_its_columns_stand_under_their_names():
    big = {"nbytes": 256 * M, "count": 64 * M, "dtype": "bfloat16", "op": "average"}
    fast = {"algbw_gbps": 6.25, "busbw_gbps": 6.25}
    rows = [
        row(time_us=41333.1, buffers="registered", **big, **fast),
        row(time_us=1234567.0, in_place=False, buffers="registered", **big, **fast),
        memcpy(14233.0, **big, **fast),
    ]
    lines = table.heading(has_wire=False) + table.rows(rows, has_wire=False)
    assert max(map(len, lines)) <= 120
    assert len(lines) == 5
    assert " ".join(lines[3].split()) == (
        "268435456 67108864 bfloat16 average 1234567 6.250 6.250 0 41333 6.250 "
        "6.250 0 2.00x 2.90x ringcomm reg"
    )
    for name in ("size", "count", "#wrong"):
        end = lines[1].index(name) + len(name)
        assert lines[3][end - 1].isdigit()
        assert lines[3][end : end + 1] == " "


@pytest.mark.parametrize(
    ("time_us", "text"),
    [
        (0.00834, "0.0083"),
        (3.1416, "3.142"),
        (99.994, "99.99"),
        (999.9, "999.9"),
        (41333.3, "41333"),
    ],
)
def test_a_time_is_shown_with_about_four_digits(time_us, text):
    assert table.rows([row(time_us=time_us)], has_wire=False)[0].split()[8] == text


def test_a_wrong_line_has_no_time():
    line = table.rows([row(time_us=None, wrong=7)], has_wire=False)[0]
    assert line.split()[8:12] == ["-", "-", "-", "7"]


def test_between_hosts_the_table_tells_the_share_of_the_link():
    line = table.rows([row(wire_share=0.834)], has_wire=True)[0]
    assert "83%" in line


def test_the_preamble_says_what_speaks_against_trusting_it():
    text = "\n".join(table.preamble(report(size=8, load=3.2, link_gbps=0.0244, hosts=3)))
    assert "more ranks than cores" in text
    assert "load average 3.2" in text
    assert "24.4 MB/s" in text
    quiet = "\n".join(table.preamble(report()))
    assert "load" not in quiet
    assert "more ranks" not in quiet


# --- compare ------------------------------------------------------------------------------------
def test_the_fastest_mpi_is_the_least_multiple_of_its_own_memcpy():
    # 300 / 100 = 3 beats 260 / 65 = 4 although it took longer.
    ours = report(row(time_us=60), row("native", 400), memcpy(100))
    slow_machine = report(row("native", 300), memcpy(100), mpi="MPICH 5", is_mpi_default=True)
    fast_machine = report(row("native", 260), memcpy(65))
    verdict = compare.judge([ours, slow_machine, fast_machine])[0]
    assert verdict.mpi.report is slow_machine
    figures = {figure.name: figure.value for figure in verdict.figures()}
    assert figures["x MPI"] == pytest.approx(5)
    assert figures["/memcpy"] == pytest.approx(0.6)
    assert "MPICH 5, defaults" in compare.lines([verdict])[1]


def test_a_figure_that_misses_its_goal_is_marked():
    ours = report(row(time_us=100), row("native", 110), memcpy(100))
    line = compare.lines(compare.judge([ours]))[1]
    assert "x MPI 1.10 >=1.4 !" in line
    assert compare.lines([]) == ["no line of ringcomm with a memcpy beside it"]


def test_at_1_kib_the_goal_is_a_difference_in_time():
    small = {"nbytes": K, "count": 256}
    ours = report(row(time_us=5.5, **small), row("native", 4, **small), memcpy(1, **small))
    figure = next(f for f in compare.judge([ours])[0].figures() if f.name == "us over MPI")
    assert (figure.value, figure.at_most, figure.is_met) == (pytest.approx(1.5), 2, True)


def test_16_bit_floats_are_held_against_float32_of_the_same_run():
    ours = report(
        row(time_us=10), row(time_us=20, dtype="float16"), memcpy(5), memcpy(5, dtype="float16")
    )
    by_dtype = {verdict.key.dtype: verdict.as_float32 for verdict in compare.judge([ours])}
    assert by_dtype == {"float32": None, "float16": 2}


def test_columns_are_apart_and_a_sentence_sums_up(tmp_path, capsys):
    small = {"nbytes": K, "count": 256}
    found = report(row(time_us=123.5, **small), row("native", 4, **small), memcpy(1, **small))
    path = tmp_path / "a.json"
    path.write_text(to_json(found))
    assert cli.main(["bench", "compare", str(path)]) == 0
    text = capsys.readouterr().out
    figures = [f for v in compare.judge([found]) for f in v.figures()]
    assert max(map(len, map(str, figures))) > 20  # more than a column had
    line = text.splitlines()[1]
    assert [str(f) for f in figures] == re.split(r"  +", line.strip())[2 : 2 + len(figures)]
    n_missed = line.count("!")
    assert n_missed
    n_asked = len([f for f in figures if f.asked])
    last = text.splitlines()[-1]
    assert last.startswith(f"{n_asked - n_missed} of {n_asked} goals are met; {n_missed} missed")


def test_wrong_lines_and_other_rank_counts_are_not_compared():
    ours = report(row(time_us=None, wrong=3), memcpy(5))
    assert compare.judge([ours]) == []
    four = report(row("native", 1), memcpy(5), size=4)
    assert compare.judge([report(row(), memcpy(5)), four])[0].mpi is None


@pytest.mark.parametrize(
    ("nbytes", "size", "hosts", "is_registered", "asked"),
    [
        (M, 2, 1, True, Goal(speedup_mpi=5)),
        (64 * M, 4, 1, True, Goal(speedup_mpi=5, memcpy=0.65)),
        (4 * M, 2, 1, False, Goal(speedup_mpi=1.3)),
        (2 * M, 2, 1, False, Goal(speedup_mpi=1)),
        (32 * K, 2, 1, True, Goal()),
        (16 * M, 16, 1, True, Goal(speedup_mpi=1, speedup_gloo=1, p99=5)),
        (16 * M, 16, 1, False, Goal()),
        (8 * M, 3, 3, False, Goal(speedup_mpi=2, wire=0.8)),
        (4 * M, 6, 3, True, Goal(speedup_mpi=2, speedup_gloo=1.3)),
    ],
)
def test_goals_follow_size_ranks_hosts_and_buffers(nbytes, size, hosts, is_registered, asked):
    assert goal(nbytes, size=size, hosts=hosts, is_registered=is_registered) == asked


def test_compare_reads_files_and_names_one_that_is_not_there(tmp_path, capsys):
    path = tmp_path / "a.json"
    path.write_text(to_json(report(row(), row("native", 90), memcpy(5))))
    assert cli.main(["bench", "compare", str(path)]) == 0
    assert "x MPI 9.00 >=1.4" in capsys.readouterr().out
    assert cli.main(["bench", "compare", str(tmp_path / "b.json")]) == 2
    assert "b.json" in capsys.readouterr().err


# --- the command line ---------------------------------------------------------------------------
def test_both_forms_and_mpi_are_the_default():
    wanted = parse([])
    assert (wanted.collectives, wanted.forms, wanted.against) == (
        ("allreduce",),
        (False, True),
        ("native",),
    )
    assert parse(["--in-place", "--against", "none"]).forms == (True,)
    assert parse(["--collective", "all"]).collectives == tuple(COLLECTIVES)


@pytest.mark.parametrize(
    "argv",
    [
        ["--collective", "allreduc"],
        ["--sizes", "8:4"],
        ["--dtype", "float8"],
        ["--json", "/no/such/folder/x.json"],
        ["--iterations", "0"],
        ["--seconds", "-1"],
        ["--mpi-defaults", "--mode", "named"],
        ["--mpi-defaults", "--against", "gloo"],
    ],
)
def test_a_wrong_command_line_is_refused_before_mpi_starts(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_at_once(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["bench", "--plot", str(tmp_path / "x.png")]) == 2
    assert "pip install 'ringcomm[plot]'" in capsys.readouterr().err


# --- the picture --------------------------------------------------------------------------------
REPORT = report(
    row(time_us=50, buffers="registered"),
    row(time_us=80),
    row(time_us=90, in_place=False),
    row("native", 200),
    memcpy(40),
)


class Panel:
    def __init__(self):
        self.lines = {}

    def loglog(self, x, y, *, label, **style):
        self.lines[label] = list(zip(x, y, strict=True))

    def set(self, **labels): ...
    def grid(self, *args, **kwargs): ...
    def legend(self): ...


def test_the_picture_has_a_line_per_engine_and_its_speedup(monkeypatch, tmp_path):
    panels = np.array([[Panel(), Panel()]])
    figure = types.SimpleNamespace(
        subplots=lambda *args, **kwargs: panels, savefig=lambda path: path.write_text("drawn")
    )
    module = types.ModuleType("matplotlib.figure")
    module.Figure = lambda **kwargs: figure
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    plot.draw(REPORT, tmp_path / "x.png")
    left, right = (panel.lines for panel in panels[0])
    assert left == {
        "ringcomm reg": [(M, 50)],
        "ringcomm": [(M, 80)],  # in place, not 90
        "native": [(M, 200)],
        "memcpy": [(M, 40)],
    }
    assert right["ringcomm reg"] == [(M, 4)]
    assert (tmp_path / "x.png").read_text() == "drawn"


def test_matplotlib_draws_it(tmp_path):
    pytest.importorskip(
        "matplotlib", reason="an extra, for pictures alone: pip install 'ringcomm[plot]'"
    )
    plot.draw(REPORT, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
