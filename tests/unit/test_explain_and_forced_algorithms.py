"""What rc.explain() says, and RINGCOMM_ALGORITHM."""

import functools

import ml_dtypes
import numpy as np
import pytest
from harness import run_ranks
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm import config
from ringcomm.config import Settings
from ringcomm.engine.core.algorithm_choice import MODULES
from ringcomm.transport.node.steps import NodeReduction
from ringcomm.transport.wire_team import most_brought


def explained(*args, nodes=(0, 0, 2, 2), algorithm="auto", **kwargs):
    """Return what every one of the ranks is told, which must be the same."""
    [told] = {
        str(each)
        for each in run_ranks(
            len(nodes),
            lambda _: rc.explain(*args, **kwargs),
            hub=LoopbackHub(len(nodes), nodes),
            settings=Settings(timeout_s=120, algorithm=algorithm),
        )
    }
    return told


def test_it_tells_the_choice_why_the_topology_and_all_candidates():
    first, *rows = explained(1 << 20).splitlines()
    assert first == (
        "allreduce of 1 MiB float32 SUM on 2 hosts x 2 ranks: hierarchical, the fastest by "
        "estimate (to measure: ringcomm run -np 4 ringcomm tune)"
    )
    assert rows[0].split()[0] == "hierarchical"
    assert {row.split()[0] for row in rows} == set(config.ALGORITHMS)
    assert rows.pop().split() == [
        "node",
        "no:",
        "not",
        "all",
        "ranks",
        "share",
        "one",
        "node's",
        "memory",
    ]
    times = [float(row.split()[1]) for row in rows]
    assert times == sorted(times)


def test_it_tells_why_an_algorithm_is_out():
    text = explained(1 << 20, "bfloat16", op=rc.AVERAGE, deterministic=True)
    assert text.startswith(
        "allreduce of 1 MiB bfloat16 AVERAGE, deterministic on 2 hosts x 2 ranks: direct, the "
        "only one that can"
    )
    assert "\n  ring          no: it would round bfloat16 at every rank" in text


def test_it_tells_what_is_forced_and_what_cannot_be():
    assert ": ring, as RINGCOMM_ALGORITHM says" in explained(1024, algorithm="ring")
    assert (
        ": direct, the only one that can (ring, as RINGCOMM_ALGORITHM says, cannot)"
        in explained(
            *(1 << 20, "float16"), collective="reduce_scatter", deterministic=True, algorithm="ring"
        )
    )


def test_a_group_has_a_topology_of_its_own():
    def body(rank):
        group = rc.Group([0, 1]) if rank < 2 else None
        return str(rc.explain(10, group=group))

    inner, _, outer, _ = run_ranks(4, body, hub=LoopbackHub(4, (0, 0, 2, 2)))
    assert "on 1 host x 2 ranks" in inner
    assert " us" not in inner  # estimates of messages that nobody sends
    assert "on 2 hosts x 2 ranks: dissemination, as it is short" in outer
    assert " us" not in outer


def test_what_is_short_is_told_up_to_the_last_byte_that_fits():
    most = most_brought(4)
    assert "dissemination, as it is short" in explained(most)
    assert "dissemination" not in explained(most + 1)
    assert "dissemination" in explained(4 * most, collective="allgather")
    assert "dissemination" not in explained(most, algorithm="ring")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("int8", "int8"),
        (np.float64, "float64"),
        (np.dtype("f2"), "float16"),
        (bool, "bool"),
        (ml_dtypes.bfloat16, "bfloat16"),
    ],
)
def test_a_dtype_is_whatever_numpy_takes_for_one(dtype, name):
    assert f" of 8 B {name} " in explained(8, dtype, nodes=(0,))


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"dtype": "float8"}, TypeError, "'float8' cannot be sent; dtypes are float16, "),
        ({"dtype": object}, TypeError, "cannot be sent"),
        ({"dtype": "float32", "op": rc.BAND}, TypeError, "BAND of float32 has no meaning"),
        ({"collective": "broadcast"}, ValueError, "must be one of allreduce, reduce_scatter, all"),
        ({"nbytes": -1}, ValueError, "nbytes is -1"),
    ],
)
def test_a_wrong_argument_is_named(kwargs, error, text):
    with pytest.raises(error, match=text):
        explained(**{"nbytes": 8, "nodes": (0,)} | kwargs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", {}),
        ("ring", dict.fromkeys(config.COLLECTIVES, "ring")),
        ("allreduce:ring,allgather:direct", {"allreduce": "ring", "allgather": "direct"}),
        ("ring,allgather:auto", {"allreduce": "ring", "reduce_scatter": "ring"}),
    ],
)
def test_an_algorithm_is_forced_for_all_collectives_or_for_some(text, expected):
    assert config.read_settings({"RINGCOMM_ALGORITHM": text}).forced == expected


@pytest.mark.parametrize("text", ["", "rings", "broadcast:ring", "allreduce:", "ring,", ":ring"])
def test_an_unknown_algorithm_names_the_known_ones(text):
    with pytest.raises(rc.ConfigError, match=f"RINGCOMM_ALGORITHM is '{text}'.*hierarchical"):
        config.read_settings({"RINGCOMM_ALGORITHM": text})


@pytest.mark.parametrize(
    ("text", "what"),
    [("allreduce:ring,allreduce:direct", "allreduce"), ("ring,direct", "all collectives")],
)
def test_two_choices_for_the_same_are_refused(text, what):
    with pytest.raises(rc.ConfigError, match=f"which has two choices for {what}"):
        config.read_settings({"RINGCOMM_ALGORITHM": text})


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("1MiB",), TypeError, "nbytes is '1MiB'; it must be a number of bytes"),
        ((True,), TypeError, "nbytes is True"),
        ((8, "allgather"), TypeError, "Pass collective='allgather'"),
    ],
)
def test_what_explain_cannot_take(arguments, error, text):
    def body(_rank):
        with pytest.raises(error, match=text):
            rc.explain(*arguments)

    run_ranks(1, body)


@pytest.mark.parametrize("algorithm", config.ALGORITHMS)
def test_what_is_forced_is_what_is_run(algorithm, monkeypatch):
    nodes, run = (0,) * 5 if algorithm == "node" else (0, 0, 2, 2, 2), []
    module = MODULES[algorithm]
    allreduce_, begin = module.allreduce_, NodeReduction.begin

    @functools.wraps(allreduce_)
    async def spy(x, t, op):
        run.append(t.rank)
        await allreduce_(x, t, op)

    def spy_on_step(self, where):
        run.append(where.team.team.index)
        return begin(self, where)

    if algorithm == "node":  # one step is carried out without its module
        monkeypatch.setattr(NodeReduction, "begin", spy_on_step)
    else:
        monkeypatch.setattr(module, "allreduce_", spy)
    results = run_ranks(
        5,
        lambda rank: rc.allreduce(np.full(300, rank + 1.0)),
        hub=LoopbackHub(5, nodes),
        settings=Settings(timeout_s=120, algorithm=algorithm),
    )
    assert sorted(run) == [0, 1, 2, 3, 4]
    assert all((total == 15).all() for total in results)


def test_a_forced_algorithm_that_cannot_is_announced_once_by_the_first_rank(caplog):
    def body(rank):
        for _ in range(2):
            rc.allreduce(np.ones(3, np.float16))
            rc.allreduce(np.ones(5, np.float16))

    run_ranks(3, body, settings=Settings(timeout_s=120, algorithm="ring"))
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "RINGCOMM_ALGORITHM: allreduce cannot use ring, because it would round float16 at every "
        "rank, not once at the end; it uses direct."
    )
