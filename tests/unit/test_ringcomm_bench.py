"""`ringcomm bench`: what is measured, right answers, and what it does with wrong ones."""

import sys
from argparse import ArgumentTypeError
from functools import partial

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.launch import bench, tune
from ringcomm.launch.bench import CALLS, Arrays, Row
from ringcomm.launch.option_types import sizes

F32 = np.dtype("float32")
K, M = 1 << 10, 1 << 20


# --- the command line ---------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8:64", (8, 16, 32, 64)),
        ("1K:20kib:4", (K, 4 * K, 16 * K)),
        ("1MB,8,8:16,2G", (8, 16, M, 2 << 30)),
        ("7:7", (7,)),
    ],
)
def test_ranges_and_lists_become_rising_sizes(text, found):
    assert sizes(text) == found


@pytest.mark.parametrize(
    "text", ["", "0", "-8", "1T", "8:4", "8:64:1", "8:64:x", "1:2:3:4", "1.5K"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="size"):
        sizes(text)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["allreduc"], "'allreduc' is not one of barrier, sendrecv, "),
        (["--sizes", "8:4"], "no range of sizes"),
        (["--dtype", "float8"], "float8"),
        (["--json", "/no/such/folder/x.json"], "no folder"),
        (["--json", "/"], "is a folder"),
        (["--seconds", "-1"], "seconds"),
        (["--against=gloo"], "--against"),
    ],
)
def test_a_wrong_command_line_is_refused_before_mpi_starts(argv, said, capsys):
    with pytest.raises(SystemExit) as caught:
        bench.main(argv)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err
    assert not rc.is_initialized()


@pytest.mark.parametrize(("command", "main"), [("bench", bench.main), ("tune", tune.main)])
def test_np_starts_ranks_of_its_own_as_run_does(command, main, monkeypatch):
    started = []
    monkeypatch.setattr("ringcomm.launch.job.command.main", lambda argv: started.append(argv) or 7)
    assert main(["--sizes", "8", "-np", "2", "--seconds=0"]) == 7
    [[option, n, python, *rest]] = started
    assert (option, n, python) == ("-np", "2", sys.executable)
    assert rest == ["-P", "-m", "ringcomm", command, "--sizes", "8", "--seconds=0"]
    for wrong in (["-np", "1"], ["-np", "two"], ["-np", "2", "--sizes", "4Q"]):
        with pytest.raises(SystemExit):
            main(wrong)
    assert len(started) == 1


def test_every_blocking_call_on_arrays_has_a_row():
    others = ("_async", "_async_", "_object", "grouped_")
    starts = ("allreduce", "reduce", "allgather", "broadcast", "gather", "scatter", "alltoall")
    public = {
        name
        for name in rc.__all__
        if name.startswith((*starts, "scan", "exscan", "barrier", "send", "isend"))
        if not any(each in name for each in others)
    }
    in_pingpong = {"send"}
    assert set(CALLS) == public - in_pingpong | {"pingpong", "memcpy"}
    assert bench.parser().parse_args([]).calls == []  # all


# --- right answers ------------------------------------------------------------------------------
def on_ranks(size, body):
    """Return what body(arrays of that rank) returns, of ranks as threads."""
    return run_ranks(size, lambda rank: body(Arrays(4 * 30_000, F32)))


def test_every_call_expects_what_its_name_says():
    size, p = 3, 10_000

    def sent_and_expected(a):
        a.fill()
        return a.x.copy(), {name: bench.expected(name, a) for name in CALLS if name != "barrier"}

    sent, found = zip(*on_ranks(size, sent_and_expected), strict=True)
    total, parts = sum(sent), [np.split(x, size) for x in sent]
    right = {
        "sendrecv": [sent[2], sent[0], sent[1]],
        "isend": [sent[2], sent[0], sent[1]],
        "pingpong": [sent[0], sent[0], None],
        "allreduce": [total] * 3,
        "reduce": [total, None, None],
        "reduce_scatter": np.split(total, 3),
        "scan": [sent[0], sent[0] + sent[1], total],
        "exscan": [0 * total, sent[0], sent[0] + sent[1]],
        "broadcast": [sent[0]] * 3,
        "allgather": [np.concatenate([x[:p] for x in sent])] * 3,
        "gather": [np.concatenate([x[:p] for x in sent]), None, None],
        "scatter": parts[0],
        "alltoall": [np.concatenate([x[r] for x in parts]) for r in range(size)],
        "memcpy": sent,
    }
    for name in set(CALLS) - {"barrier"}:
        for rank, result in enumerate(right[name.rstrip("_")]):
            expected = found[rank][name]
            assert (expected is None) == (result is None), name
            assert result is None or np.array_equal(expected, result), name


def test_no_rank_and_no_part_looks_like_another():
    sent = on_ranks(3, lambda a: a.fill() or a.x.copy())
    chunks = [chunk.tobytes() for x in sent for chunk in np.split(x, 30)]
    assert len(set(chunks)) == len(chunks)


@pytest.mark.parametrize("dtype", ["float16", "int8", "complex64"])
def test_sums_are_exact_in_short_dtypes(dtype):
    def wrong(a):
        return [row.wrong for row in bench.measure("allreduce", a, WAYS, 0)]

    assert run_ranks(3, lambda rank: wrong(Arrays(300, np.dtype(dtype)))) == [[0, 0]] * 3


WAYS = {"ringcomm": bench.ringcomm_way, "rc.zeros": bench.shared_way}


@pytest.mark.parametrize("nbytes", [1, 4 * 30_000])
def test_every_call_is_right_and_timed(nbytes):
    def body(rank):
        a = Arrays(nbytes, F32)
        return [row for call in CALLS for row in bench.measure(call, a, WAYS, 0)]

    rows, *others = run_ranks(3, body)
    assert others == [rows] * 2  # the same on every rank
    assert [row.call for row in rows if row.way == "ringcomm"] == list(CALLS)
    assert {row.call for row in rows if row.way == "rc.zeros"} == set(bench.REDUCTIONS)
    assert all(row.wrong == 0 and 0 < row.least_us <= row.us for row in rows)
    assert {row.nbytes for row in rows} == {0, nbytes}


def faulty(wrong_from, spoil):
    """Return a way that is wrong on rank 1 from its n-th call on."""

    def way(call, a):
        calls = []

        def made():
            calls.append(None)
            result = bench.ringcomm_way(call, a)()
            result = a.y if result is None or np.ndim(result) == 0 else result
            if len(calls) >= wrong_from and a.rank == 1:
                spoil(result)
            return result

        return made

    return way


def add_to_last(x):
    x[-1] += 1


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("call", ["allreduce_", "alltoall", "sendrecv", "reduce_scatter_"])
def test_a_result_that_is_wrong_on_one_rank_is_counted(call, n):
    def body(rank):
        a = Arrays(4096, F32)
        return bench.measure(call, a, {"it": faulty(n, add_to_last)}, 0)[0]

    row, same = run_ranks(2, body)
    assert row == same
    assert row.wrong == 1
    assert (row.us is None) == (n == 1)  # what goes wrong while timed is found at the end


def test_a_negative_zero_and_a_short_result_are_wrong():
    def body(rank):
        a = Arrays(8, F32)
        short = {"it": lambda call, a: lambda: a.x[:0]}
        negative = {"it": lambda call, a: lambda: -bench.expected("exscan", a)}
        return [bench.measure("exscan", a, ways, 0)[0].wrong for ways in (short, negative)]

    assert run_ranks(2, body)[0] == [4, 4]  # -0.0 on rank 0, negative numbers on rank 1


def test_what_a_way_cannot_do_is_left_out():
    rows = on_ranks(2, lambda a: bench.measure("scan", a, {"it": lambda call, a: None}, 0))
    assert rows == [[], []]


# --- time ---------------------------------------------------------------------------------------
def test_ways_take_turns_and_each_batch_has_a_call_that_is_not_recorded():
    def body(rank):
        turns = []
        calls = [partial(turns.append, name) for name in "ab"]
        return turns, [each.shape for each in bench.take_turns(calls, 1, batches=2)]

    for turns, shapes in run_ranks(2, body):
        n = m = bench._MOST_CALLS
        order = ["a"] * (n + 1) + ["b"] * (m + 1)
        assert turns[2 * (3 + 4) :] == order + order[::-1]
        assert shapes == [(2,), (2,)]


def test_a_batch_is_as_slow_as_its_slowest_rank(monkeypatch):
    def body(rank):
        monkeypatch.setattr(bench, "_batch_s", lambda call, n: call())
        return bench.take_turns([lambda: 1.0 + rank, lambda: 3.0 - rank], 0, batches=2)

    for found in run_ranks(2, body):
        assert np.array_equal(found, [[2, 2], [3, 3]])


# --- the table ----------------------------------------------------------------------------------
SIZES = (8, K, 64 * K, M, 16 * M)
FACTS = {
    "version": "1", "size": 2, "hosts": 1, "cores": 2, "mpi": "Open MPI", "dtype": "float32"
}  # fmt: skip


def test_calls_are_lines_and_sizes_are_columns_on_80_characters():
    rows = [
        Row("reduce_scatter_", way, nbytes, us)
        for way in ("ringcomm", "mpi4py")
        for nbytes, us in zip(SIZES, (4.04, 99.94, 123.4, 1234.5, 1_234_567.8), strict=True)
    ]
    text = [*bench.heading(SIZES), *bench.lines(rows, SIZES)]
    assert [line.split() for line in text] == [
        ["8", "B", "1", "KiB", "64", "KiB", "1", "MiB", "16", "MiB"],
        ["reduce_scatter_", "4.0", "99.9", "123", "1,234", "1,234,568"],
        ["mpi4py", "4.0", "99.9", "123", "1,234", "1,234,568"],
    ]
    assert len({len(line) for line in text}) == 1  # each figure ends under its size
    assert len(text[0]) <= 80


def test_all_calls_fit_a_screen():
    rows = [[Row(call, "ringcomm", n, 1.0) for n in SIZES] for call in CALLS]
    assert sum(len(bench.lines(each, SIZES)) for each in rows) + 6 <= 30


def test_a_barrier_has_one_figure_and_what_is_missing_or_wrong_is_told():
    assert [line.split() for line in bench.lines([Row("barrier", "ringcomm", 0, 3.0)], SIZES)] == [
        ["barrier", "3.0"]
    ]
    rows = [Row("scan", "ringcomm", 8, None, wrong=2), Row("scan", "ringcomm", M, 5.0)]
    assert bench.lines(rows, (8, K, M))[0].split() == ["scan", "WRONG", "-", "5.0"]


def test_many_sizes_are_several_tables_and_only_the_first_has_the_barrier(monkeypatch, capsys):
    argv = ["barrier", "memcpy", "--sizes", "1:256", "--seconds", "0"]
    monkeypatch.setattr(bench.rc, "init", lambda: None)  # the ranks are there
    monkeypatch.setattr(bench, "_facts", lambda args: FACTS | {"hosts": 1, "size": 2})

    def body(rank):
        return bench.measure_all(bench.parser().parse_args(argv), {"it": bench.ringcomm_way})

    report, same = run_ranks(2, body)
    assert report["rows"] == same["rows"]
    assert [row["nbytes"] for row in report["rows"]] == [0, *(1 << n for n in range(9))]
    words = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line]
    assert words[-5:] == ["1", "barrier", "memcpy", "256", "memcpy"]


def test_the_heading_says_what_speaks_against_trusting_it():
    facts = FACTS | {"load": 0.1}
    quiet = "\n".join(bench.preamble(facts))
    assert "2 ranks on 1 host, 2 cores; Open MPI" in quiet
    assert "Microseconds" in quiet
    assert "Load" not in quiet
    assert "More ranks" not in quiet
    text = "\n".join(bench.preamble(facts | {"size": 8, "hosts": 2, "load": 3.2}))
    assert "8 ranks on 2 hosts" in text
    assert "More ranks than cores" in text
    assert "Load average 3.2" in text
