"""`ringcomm bench`: sizes, bandwidths, right answers, and what it does with wrong ones."""

from argparse import ArgumentTypeError

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.launch.bench import command, exact_inputs, runner, table
from ringcomm.launch.bench.cases import (
    COLLECTIVES,
    BenchCase,
    bus_factor,
    make_case,
    parse_sizes,
    wire_bytes,
)
from ringcomm.launch.bench.table import BenchRow

F32 = np.dtype("float32")
K, M = 1 << 10, 1 << 20


# --- sizes --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8:64", (8, 16, 32, 64)),
        ("1K:20kib:4", (K, 4 * K, 16 * K)),
        ("1MB,8,8:16,2G", (8, 16, M, 2 << 30)),
        ("7:7", (7,)),
    ],
)
def test_ranges_and_lists_become_rising_sizes(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text", ["", "0", "-8", "1T", "8:4", "8:64:1", "8:64:x", "1:2:3:4", "1.5K"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="size"):
        parse_sizes(text)


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
    case = BenchCase(collective, "", np.dtype("int8"), 0 if collective == "barrier" else 300, 9)
    assert wire_bytes(case, 3) == pytest.approx(nbytes)
    assert wire_bytes(case, 1) == 0


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
    assert make_case(collective, "sum", F32, nbytes, 3).count == count


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
    case = BenchCase("allreduce", op, np.dtype(dtype), 20_000, size)
    sent = [np.empty(case.count, dtype) for _ in range(size)]
    for rank, x in enumerate(sent):
        exact_inputs.fill(x, case, rank)
    wide = np.array(sent) if dtype == "bool" else np.array(sent, dtype=np.complex128)
    ufuncs = {"product": np.multiply, "min": np.minimum, "max": np.maximum}
    total = ufuncs.get(op, np.add).reduce(wide, axis=0) / (size if op == "average" else 1)
    assert np.array_equal(
        exact_inputs.expected(case, 0), total.real.astype(dtype) if dtype[0] != "c" else total
    )


def sent_by(case, rank):
    x = np.empty(case.part if COLLECTIVES[case.collective].gives_part else case.count, case.dtype)
    exact_inputs.fill(x, case, rank)
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
            expected = exact_inputs.expected(cases[name], rank)
            assert (expected is None) == (result is None), name
            assert result is None or np.array_equal(expected, result), name


def test_no_rank_and_no_chunk_looks_like_another():
    parts = [sent_by(BenchCase("allreduce", "sum", F32, 1 << 15, 3), rank) for rank in range(3)]
    chunks = [chunk.tobytes() for x in parts for chunk in np.split(x, 32)]
    assert len(set(chunks)) == len(chunks)


@pytest.mark.parametrize("dtype", ["float32", "complex128", "bool", "float16"])
def test_wrong_elements_are_counted_bit_by_bit(dtype):
    right = np.ones(100, dtype)
    result = right.copy()
    result[[3, 99]] = 0
    assert exact_inputs.count_wrong(right.copy(), right) == 0
    assert exact_inputs.count_wrong(result, right) == 2
    assert exact_inputs.count_wrong(right[1:], right) == 100
    assert exact_inputs.count_wrong(None, right) == 100
    assert exact_inputs.count_wrong(result, None) == 0


def test_a_negative_zero_is_wrong():
    assert exact_inputs.count_wrong(np.array([-0.0]), np.array([0.0])) == 1


# --- the measurement ----------------------------------------------------------------------------
def faulty(wrong_from=None, does_spoil_input=False):
    """Return an engine that is wrong on rank 1 from its n-th call on."""
    calls = []

    def bind(case, send, recv):
        def call():
            calls.append(None)
            rc.allreduce_(recv if recv is send else np.copyto(recv, send) or recv)
            is_wrong = wrong_from is not None and len(calls) >= wrong_from and rc.rank() == 1
            recv[-1] += is_wrong
            send[0] += does_spoil_input
            return recv

        return call

    return bind, calls


def measured(made, *, forms=(True,), batches=2, collective="allreduce"):
    """Return the rows of 2 ranks as threads, of an engine each, and the calls that rank 1 made."""

    def body(rank):
        engine, calls = made()
        send, recv = np.empty((2, 4096), np.uint8)
        contenders = [
            runner.Contender("it", "private", engine, send, recv),
            runner.Contender("memcpy", "private", runner.memcpy, send, recv),
        ]
        case = make_case(collective, "sum", F32, 4096, 2)
        return runner.measure(case, contenders, forms=forms, batches=batches), len(calls)

    (rows, _), (same, calls) = run_ranks(2, body)
    assert rows == same  # on every rank
    return rows, calls


@pytest.mark.parametrize("mode", runner.MODES)
def test_ringcomm_is_timed_beside_the_memcpy(mode):
    rows, _ = measured(lambda: (runner.ringcomm_in(mode), []), forms=(False, True))
    assert [(row.engine, row.in_place) for row in rows] == [
        ("it", False),
        ("it", True),
        ("memcpy", False),
    ]
    for row in rows:
        assert row.wrong == 0
        assert row.time_us > 0  # a mean: one hiccup among 1000 calls lifts it above the p99
        assert 0 < row.call_p50_us <= row.p99_us
        assert row.calls >= 2
        assert row.algbw_gbps == row.busbw_gbps == pytest.approx(4096 / row.time_us / 1e3)


@pytest.mark.parametrize("n", [1, 3])
def test_a_result_that_is_wrong_on_one_rank_is_counted(n):
    rows, calls = measured(lambda: faulty(wrong_from=n))
    assert rows[0].wrong == 1
    assert (rows[0].time_us is None) == (n == 1)  # what goes wrong while timed is found at the end
    assert (calls == 1) == (n == 1)


def test_an_engine_that_spoils_its_input_is_wrong():
    rows, _ = measured(lambda: faulty(does_spoil_input=True), forms=(False,))
    assert rows[0].wrong == 2  # an element of each rank


def test_what_an_engine_cannot_do_is_left_out():
    rows, _ = measured(lambda: (lambda case, send, recv: None, []), forms=(False, True))
    assert [row.engine for row in rows] == ["memcpy"]


def test_a_barrier_that_lets_ranks_through_is_wrong():
    open_door = (lambda case, send, recv: lambda: None, [])
    rows, _ = measured(lambda: open_door, forms=(False,), collective="barrier")
    assert rows[0].wrong == 1
    rows, _ = measured(
        lambda: (runner.ringcomm_in("sync"), []), forms=(False,), collective="barrier"
    )
    assert rows[0].wrong == 0


def test_engines_take_turns_and_each_batch_has_a_call_that_is_not_recorded():
    def body(rank):
        turns = []
        calls = [lambda name=name: turns.append(name) for name in "ab"]
        times_s = runner.take_turns(calls, seconds=1, batches=2)
        return turns, [each.shape for each in times_s]

    for turns, shapes in run_ranks(2, body):
        (n, m), pilot = (shape[2] for shape in shapes), 2 * (3 + 4)
        order = ["a"] * (n + 1) + ["b"] * (m + 1)
        assert turns[pilot:] == order + order[::-1]
        assert shapes == [(2, 2, n), (2, 2, m)]


# --- the table ----------------------------------------------------------------------------------
def row(engine="ringcomm", time_us=10.0, **changes):
    times = {} if time_us is None else {"call_p50_us": time_us, "p99_us": 2 * time_us}
    plain = ("allreduce", "sum", "float32", M, M // 4, engine, "private", True, 0)
    found = BenchRow(*plain, time_us=time_us, **times)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_the_table_fits_120_columns_and_its_columns_stand_under_their_names():
    big = {"nbytes": 256 * M, "count": 64 * M, "dtype": "bfloat16", "op": "average"}
    fast = {"algbw_gbps": 6.25, "busbw_gbps": 6.25}
    rows = [
        row(time_us=41333.1, buffers="registered", **big, **fast),
        row(time_us=1234567.0, in_place=False, buffers="registered", **big, **fast),
        row("memcpy", 14233.0, in_place=False, **big, **fast),
    ]
    lines = table.heading(has_wire=False) + table.lines(rows, has_wire=False)
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
    assert table.lines([row(time_us=time_us)], has_wire=False)[0].split()[8] == text


def test_a_wrong_line_has_no_time():
    line = table.lines([row(time_us=None, wrong=7)], has_wire=False)[0]
    assert line.split()[8:12] == ["-", "-", "-", "7"]


def test_a_link_is_as_fast_as_the_best_batch_of_any_call_on_its_slowest_rank():
    slow = np.full((2, 3, 4), 0.5)  # ranks, batches, calls
    fast = np.full((2, 3, 4), 0.4)
    fast[0, 1] = 0.1  # the other rank takes 0.4 s
    fast[:, 2] = [[0.1, 0.3, 0.2, 0.2], [0.1, 0.1, 0.1, 0.1]]
    assert runner.best_gbps(10**9, [slow, fast, slow]) == pytest.approx(5)


def test_between_hosts_the_table_tells_the_share_of_the_link():
    line = table.lines([row(wire_share=0.834)], has_wire=True)[0]
    assert "83%" in line


def test_the_preamble_says_what_speaks_against_trusting_it():
    facts = {"version": "1", "size": 2, "hosts": 1, "cores": 2, "load": 0.1, "mpi": "Open MPI"}
    facts |= {"mode": "sync", "settings": {"RINGCOMM_TIMEOUT_S": "9"}, "link_gbps": None}
    quiet = "\n".join(command._preamble(facts))
    assert "RINGCOMM_TIMEOUT_S=9" in quiet
    assert "load" not in quiet
    assert "more ranks" not in quiet
    text = "\n".join(command._preamble(facts | {"size": 8, "load": 3.2, "link_gbps": 0.0244}))
    assert "more ranks than cores" in text
    assert "load average 3.2" in text
    assert "24.4 MB/s" in text


# --- the command line ---------------------------------------------------------------------------
def test_both_forms_and_buffers_are_the_default():
    wanted = command.parser().parse_args([])
    assert (wanted.collective, wanted.forms) == (("allreduce",), (False, True))
    assert wanted.buffers == ("registered", "private")
    wanted = command.parser().parse_args(["--in-place", "--collective", "all"])
    assert (wanted.collective, wanted.forms) == (tuple(COLLECTIVES), (True,))


@pytest.mark.parametrize(
    "argv",
    [
        ["--collective", "allreduc"],
        ["--sizes", "8:4"],
        ["--dtype", "float8"],
        ["--json", "/no/such/folder/x.json"],
        ["--json", "/"],
        ["--iterations", "0"],
        ["--seconds", "-1"],
        ["--against", "gloo"],  # stands in ci/bench
    ],
)
def test_a_wrong_command_line_is_refused_before_mpi_starts(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        command.main(argv)
    assert caught.value.code == 2
    assert capsys.readouterr().err
    assert not rc.is_initialized()
