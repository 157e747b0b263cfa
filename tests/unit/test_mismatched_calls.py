"""Ranks that call different things: the same error everywhere, and the engine works afterwards."""

from itertools import product

import numpy as np
import pytest
from harness import run_ranks

import ringcomm as rc
from ringcomm.collectives.operators import ReductionOptions
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.engine.core.call import Call, explain_mismatch
from ringcomm.engine.operations.adasum import plan_adasum
from ringcomm.engine.operations.allreduce import plan_allreduce
from ringcomm.engine.operations.broadcast import plan_broadcast
from ringcomm.engine.operations.grouped import plan_grouped_allreduce
from ringcomm.engine.operations.into_array import (
    plan_allgather_into,
    plan_alltoall_into,
    plan_reduce_scatter_into,
)
from ringcomm.engine.operations.reduce import plan_reduce
from ringcomm.engine.operations.reduce_scatter import plan_reduce_scatter

SUM = ReductionOptions()
pytestmark = pytest.mark.usefixtures("wire")

CASES = {
    "dtype": (
        lambda r: rc.allreduce(np.ones((2, 2), np.float16 if r == 2 else np.float32), name="w"),
        "allreduce[w]: ranks 0, 1 sent float32 (2, 2), rank 2 sent float16 (2, 2). Cast",
    ),
    "shape": (
        lambda r: rc.allreduce(np.ones((2, 2 + (r == 1))), name="w"),
        "allreduce[w]: ranks 0, 2 sent float64 (2, 2), rank 1 sent float64 (2, 3).",
    ),
    "same count, other shape": (
        lambda r: rc.allreduce(np.ones((4, 1) if r else (2, 2)), name="w"),
        "rank 0 sent float64 (2, 2), ranks 1, 2 sent float64 (4, 1).",
    ),
    "op": (
        lambda r: rc.allreduce(np.ones(2), rc.AVERAGE if r == 0 else rc.SUM, name="w"),
        "rank 0 passed op=AVERAGE, ranks 1, 2 passed op=SUM. Pass the same op=",
    ),
    "root": (
        lambda r: rc.broadcast(np.ones(2), int(r == 2), name="w"),
        "ranks 0, 1 passed root=0, rank 2 passed root=1.",
    ),
    "array of a broadcast": (
        lambda r: rc.broadcast(np.ones(2 + (r == 0)), 1, name="w"),
        "broadcast[w]: rank 0 would receive float64 (3,), rank 1 sent float64 (2,), rank 2 would "
        "receive float64 (2,).",
    ),
    "kind": (
        lambda r: rc.barrier() if r == 1 else rc.allreduce(np.ones(2)),
        "ranks 0, 2 called allreduce #1, rank 1 called barrier #1. One rank calls an "
        "operation more than another, or",
    ),
    "kind under one name": (
        lambda r: rc.barrier(name="w") if r == 1 else rc.allreduce(np.ones(2), name="w"),
        "operation [w]: ranks 0, 2 called allreduce[w], rank 1 called barrier[w]. Every rank must "
        "call the same operation under one name. Nothing was sent.",
    ),
    "in place on some": (
        lambda r: rc.allreduce_(np.ones(2)) if r == 1 else rc.allreduce(np.ones(2)),
        "called allreduce_ #1",
    ),
    "trailing dimensions of allgather": (
        lambda r: rc.allgather(np.ones((r, 2 + (r == 0))), name="w"),
        "rank 0 sent float64 (*, 3), ranks 1, 2 sent float64 (*, 2).",
    ),
    "root of broadcast_object": (
        lambda r: rc.broadcast_object("x", r % 2),
        "ranks 0, 2 passed root=0, rank 1 passed root=1.",
    ),
    "one argument is no array": (
        lambda r: rc.allreduce([1.0] if r == 1 else np.ones(1), name="w"),
        "allreduce[w]: rank 1 could not take part: TypeError: cannot communicate a builtins.list",
    ),
    "two bad arguments of different kinds": (
        lambda r: rc.allreduce([[1.0], np.ones(1), "x"][r], name="w"),
        "ranks 0, 2 could not take part: TypeError",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_mismatch_is_the_same_error_on_every_rank_and_the_engine_works_on(case):
    call, expected = CASES[case]

    def body(rank):
        with pytest.raises(rc.MismatchError) as caught:
            call(rank)
        return str(caught.value), float(rc.allreduce(np.ones(1))[0])

    texts, sums = zip(*run_ranks(3, body), strict=True)
    assert set(sums) == {3.0}
    assert len(set(texts)) == 1
    assert expected in texts[0]


def test_the_error_says_where_each_rank_is_and_that_one_may_call_an_operation_more():
    def two():
        rc.allreduce(np.ones(2))

    def three():
        rc.allreduce(np.ones(3))

    def body(rank):
        with pytest.raises(rc.MismatchError) as one_more:
            (three if rank == 0 else two)()
        with pytest.raises(rc.MismatchError) as one_call:
            rc.allreduce_async(np.ones(2 + rank), name="w").wait()
        return str(one_more.value), str(one_call.value)

    (one_more, one_call), *others = run_ranks(2, body)
    assert others == [(one_more, one_call)]
    lines = [each.__code__.co_firstlineno + 1 for each in (three, two)]
    assert "One rank calls an operation more than another" in one_more
    assert one_more.endswith(f" Rank 0 at {__file__}:{lines[0]}, rank 1 at {__file__}:{lines[1]}.")
    assert "more than another" not in one_call
    assert f"Nothing was sent. All are at {__file__}:" in one_call


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("is_named", [False, True])  # with a new name, control messages agree
def test_any_single_dissenter_is_found_by_all(size, is_named):
    def body(rank):
        found = 0
        for dissenter in range(size):
            name = f"n{dissenter}" if is_named else None
            with pytest.raises(rc.MismatchError, match=f"rank {dissenter}"):
                rc.allreduce(np.ones(1 + (rank == dissenter)), name=name)
            found += 1
        return found

    assert run_ranks(size, body) == [size] * size


# What writes into x, an array of 4 rows, or into a part of it: plan(group, x, options).
WITH_FACTORS = {
    "allreduce_": lambda g, x, o: plan_allreduce(g, None, x, o, in_place=True),
    "reduce_": lambda g, x, o: plan_reduce(g, None, x, o, 0, in_place=True),
    "reduce_scatter_": lambda g, x, o: plan_reduce_scatter(g, None, x, o, in_place=True),
    "grouped_allreduce_": lambda g, x, o: plan_grouped_allreduce(g, None, [*x], o, in_place=True),
    "adasum_": lambda g, x, o: plan_adasum(g, None, [*x], o, in_place=True),
}
WITHOUT = {
    "broadcast_": lambda g, x, _: plan_broadcast(g, None, x, 0, in_place=True),
    "allgather_into": lambda g, x, _: plan_allgather_into(g, None, x[:2], x[2]),
    "allgather_into, x its own part": lambda g, x, _: plan_allgather_into(
        g, None, x, halves(x)[g.index]
    ),
    "allgather_into, x another part": lambda g, x, _: plan_allgather_into(
        g, None, x, halves(x)[1 - g.index]
    ),
    "reduce_scatter_into": lambda g, x, o: plan_reduce_scatter_into(g, None, x[3], x[:2], o),
    "reduce_scatter_into, out a part of x": lambda g, x, o: plan_reduce_scatter_into(
        g, None, halves(x)[1 - g.index], x, o
    ),
    "alltoall_into": lambda g, x, _: plan_alltoall_into(
        g, None, x[:2], x[2:], received=[x[0].size] * 2, sent=[x[0].size] * 2
    ),
}


def halves(x):
    return [x[:2], x[2:]]


def test_what_writes_into_an_array_leaves_it_alone_if_ranks_differ():
    def body(rank):
        for kind, plan in {**WITH_FACTORS, **WITHOUT}.items():
            for factor, is_strided in product((1, 0.5), (False, True)):
                if kind in WITHOUT and (factor != 1 or (is_strided and kind != "broadcast_")):
                    continue
                if is_strided and kind == "reduce_scatter_":  # it returns a view of x
                    continue
                memory = np.arange(1.0, 1 + 4 * 2 * (3 + rank)).reshape(4, -1)
                before, x = memory.copy(), memory[:, ::2] if is_strided else memory
                options = ReductionOptions(rc.SUM).scaled(factor, 1)
                with pytest.raises(rc.MismatchError):
                    engine().execute(kind, None, lambda g: plan(g, x, options))  # noqa: B023
                if not np.array_equal(memory, before):
                    yield f"{kind}, factor {factor}, is_strided={is_strided}"

    assert run_ranks(2, lambda rank: [*body(rank)]) == [[], []]


@pytest.mark.parametrize(
    "call",
    [
        rc.allreduce_,
        lambda x: rc.reduce_(x, root=0),
        rc.reduce_scatter_,
        lambda x: rc.broadcast_(x, 0),
    ],
)
def test_a_call_that_was_made_before_leaves_its_array_alone_if_ranks_differ(call):
    def body(rank):
        x = np.zeros((4, 3))
        for _ in range(4):
            call(x)
        x[:] = 5 + rank
        with pytest.raises(rc.MismatchError):
            rc.barrier() if rank else call(x)
        return x.tolist()

    assert run_ranks(2, body) == [[[5.0] * 3] * 4, [[6.0] * 3] * 4]


@pytest.mark.long
def test_other_names_are_other_operations_and_both_are_named_at_the_deadline():
    """They may be started in any order, so nobody can know before that it is no mere delay."""

    def body(rank):
        with pytest.raises(rc.CommTimeoutError) as caught:
            rc.allreduce(np.ones(2), name=f"layer{rank}")
        return str(caught.value)

    texts = run_ranks(2, body, settings=Settings(timeout_s=0.6))
    assert any("layer0" in text and "layer1" in text for text in texts), texts


def test_fingerprints_differ_where_calls_differ():
    base = Call("allreduce", "w", reduction=SUM, dtype="float32", shape=(2, 3), root=None)
    others = [
        Call("allreduce", "w", SUM._replace(deterministic=True), "float32", (2, 3)),
        Call("allreduce", "w", SUM.scaled(2, 1), "float32", (2, 3)),
        Call("allreduce", "w", SUM.scaled(1, 2), "float32", (2, 3)),
        Call("allreduce_", "w", reduction=SUM, dtype="float32", shape=(2, 3)),
        Call("allreduce", "v", reduction=SUM, dtype="float32", shape=(2, 3)),
        Call(
            "allreduce", "w", reduction=ReductionOptions(rc.AVERAGE), dtype="float32", shape=(2, 3)
        ),
        Call("allreduce", "w", reduction=SUM, dtype="float64", shape=(2, 3)),
        Call("allreduce", "w", reduction=SUM, dtype="float32", shape=(3, 2)),
        Call("allreduce", "w", reduction=SUM, dtype="float32", shape=(2, 3), root=0),
        Call("allreduce", "w", reduction=SUM, dtype="float32", shape=(2, None)),
        Call("allreduce", "w", reduction=SUM, dtype="float32", shape=(2, 3), error="x"),
        Call("allreduce", "w" * 500 + "a", reduction=SUM, dtype="float32", shape=(2, 3)),
        Call("allreduce", "w" * 500 + "b", reduction=SUM, dtype="float32", shape=(2, 3)),
    ]
    prints = {call.fingerprint for call in [base, *others]}
    assert len(prints) == len(others) + 1
    assert all(0 <= p < 1 << 64 for p in prints)


def test_calls_survive_the_wire():
    options = ReductionOptions(rc.MAX, True, 0.1, float("inf"))
    for reduction in (None, options):
        call = Call("reduce", "größe", reduction, "bool", (None, 3), 2, error="E: x\ny")
        assert Call.unpack(call.pack()) == call


def test_many_variants_are_cut_short():
    calls = [Call("allreduce", "w", reduction=SUM, dtype="float32", shape=(n,)) for n in range(40)]
    text = explain_mismatch(calls, 1, range(40))
    assert "36 more variants" in text
    assert len(text) < 500
