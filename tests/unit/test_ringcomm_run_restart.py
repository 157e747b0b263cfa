"""Which elastic jobs `ringcomm run` starts again, where, and which it does not."""

import os
import sys
from dataclasses import replace
from itertools import product

import pytest

from ringcomm.launch.job.command import silent_hosts
from ringcomm.launch.job.hosts import Host, parse_hosts
from ringcomm.launch.job.plan_types import RunRequest
from ringcomm.launch.job.restart import Ended, agent_of, decide
from ringcomm.launch.job.verdict import Cause, Verdict

REQUEST = RunRequest(program=("train",), np=6, elastic=(2, 6), hosts=parse_hosts("h1:2,h2:2,h3:2"))
KILLED = Verdict(137, "rank 3 failed", 3, cause=Cause.LOST)
STOPPED = Verdict(75, "too few", cause=Cause.TOO_FEW)
FAILED = Verdict(1, "rank 3 failed", 3, cause=Cause.PROGRAM)
LOST = Ended(
    request=REQUEST,
    hosts=REQUEST.hosts,
    verdict=KILLED,
    was_asked_to_stop=False,
    silent={"h2"},
    n_restarts=0,
    limit=3,
)


@pytest.mark.parametrize("verdict", [KILLED, STOPPED, FAILED], ids=["killed", "75", "failed"])
def test_a_job_that_has_lost_a_host_is_started_again_on_the_others(verdict):
    decision = decide(replace(LOST, verdict=verdict))
    assert decision.request == replace(
        REQUEST, np=4, hosts=(Host("h1", 2), Host("h3", 2)), elastic=(2, 4)
    )
    assert decision.why == (
        "the job has ended, and h2 does not answer; it is started again on h1:2, h3:2"
    )


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [
        (
            STOPPED,
            "the job could not go on, and its ranks have ended in order; it is started again",
        ),
        (KILLED, "the job has lost all its workers; it is started again"),
    ],
)
def test_a_job_that_could_not_go_on_is_started_again_where_all_hosts_answer(verdict, reason):
    decision = decide(replace(LOST, silent=(), verdict=verdict))
    assert decision.request == REQUEST
    assert decision.why == reason


@pytest.mark.parametrize(
    "change",
    [
        {"verdict": Verdict(0, "completed")},
        {"was_asked_to_stop": True},
        {"silent": (), "verdict": FAILED, "limit": 0},  # nobody expects it
        {"request": replace(REQUEST, elastic=None)},
    ],
)
def test_a_job_that_nobody_expects_to_start_again_does_not_say_why(change):
    decision = decide(replace(LOST, **change))
    assert decision.request is None
    assert decision.why == ""


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"n_restarts": 3}, "it is not started again: --restarts is 3"),
        ({"silent": (), "verdict": FAILED}, "failed by itself, so the job is not started again"),
        ({"limit": 0}, "it is not started again: --restarts is 0"),
        (
            {"silent": {"h1", "h2", "h3"}},
            "h1, h2, h3 do not answer; it is not started again: the hosts that are left have 0 "
            "places, and --elastic wants 2 workers",
        ),
        ({"request": replace(REQUEST, elastic=(5, 6))}, "have 4 places, and --elastic wants 5"),
    ],
)
def test_a_job_that_cannot_be_started_again_says_why(change, why):
    decision = decide(replace(LOST, **change))
    assert decision.request is None
    assert why in decision.why


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({"np": 3, "spares": 1, "reserves": 1, "elastic": (1, 4)}, (3, 1, 0, 3)),
        ({"np": 2, "spares": 1, "elastic": (2, 5)}, (2, 1, 0, 3)),
        ({"np": None, "elastic": (2, 6)}, (4, 0, 0, 4)),
        ({"np": 6, "oversubscribes": True}, (6, 0, 0, 6)),
    ],
)
def test_workers_get_places_before_spares_and_these_before_reserves(given, left):
    request = decide(replace(LOST, request=replace(REQUEST, **given))).request
    assert (request.np, request.spares, request.reserves, request.elastic[1]) == left


BESIDE = ("servers", "evaluators", "worker_spares")


@pytest.mark.parametrize("np", [None, 2])
def test_whatever_a_job_has_beside_its_workers_it_fits_where_it_is_started_again(np):
    for counts in product(range(3), repeat=5):
        given = dict(zip((*BESIDE, "spares", "reserves"), counts, strict=True))
        request = replace(REQUEST, np=np, elastic=(1, 6), **given)
        left = decide(replace(LOST, request=request)).request
        room = 4 - sum(counts[:3])  # on two hosts
        assert (left is None) == (room < 1), given
        if left is not None:
            assert all(getattr(left, each) == given[each] for each in BESIDE), given
            assert left.elastic[0] <= left.np <= left.elastic[1], given
            assert left.np + left.spares + left.reserves <= room, given
            assert left.elastic[1] + left.spares + left.reserves <= room, given


def test_hosts_are_asked_as_mpirun_reaches_them():
    assert agent_of(REQUEST)[0] == "ssh"
    assert agent_of(replace(REQUEST, ssh=("-p", "7")))[-2:] == ("-p", "7")
    options = ("--prtemca", "plm_ssh_agent", "/a/ssh -q", "--mca", "x", "y")
    assert agent_of(replace(REQUEST, options=options)) == ("/a/ssh", "-q")


def test_hosts_that_do_not_run_a_command_are_silent(tmp_path):
    agent = [sys.executable, "-c", "import sys; sys.exit(255 * (sys.argv[1] == 'h2'))"]
    names = ["me", "h1", "h2"]
    assert silent_hosts(names, agent, os.environ, own_names={"me"}) == {"h2"}
    missing = [str(tmp_path / "missing")]
    assert silent_hosts(names, missing, os.environ, own_names={"me"}) == frozenset()
