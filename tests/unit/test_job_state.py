"""What the head of the dashboard says of a job, from its first second until after its end."""

import json

import pytest

from ringcomm.launch.dashboard.job_state import (
    LoggedStep,
    Pace,
    chief_among,
    job_state,
    pace_of,
    parameters,
    parse_logged,
    percent,
    role_of,
    seconds_left,
)
from ringcomm.launch.job.run_words import Stages

THROUGH = Stages(2, 2, 2, 2)


@pytest.mark.parametrize(
    ("recorded", "stages", "states", "word"),
    [
        ("running", Stages(2), [], "starting"),
        ("running", Stages(2, 1), [], "importing"),
        ("running", Stages(2, 2), ["importing", "importing"], "importing"),
        ("running", Stages(2, 2, 1), ["in init()", "importing"], "init"),
        ("running", Stages(2, 2, 2, 1), ["computes", "starting"], "init"),
        ("running", THROUGH, ["computes", "waits"], "training"),
        ("running", THROUGH, ["paused", "server 0: paused"], "paused"),
        ("running", THROUGH, ["left", "leaving"], "finishing"),
        ("running", THROUGH, ["dead", "computes", "spare"], "training"),
        ("running", None, ["starting", "starting"], "init"),
        ("running", None, ["waits"], "training"),
        ("finishing", THROUGH, [], "finishing"),
        ("not seen", THROUGH, ["computes"], "training"),
        ("not seen", THROUGH, [], "not seen"),
        ("completed", THROUGH, ["left", "left"], "completed"),
        ("failed", THROUGH, ["dead", "computes"], "failed"),
        ("stopped", THROUGH, [], "stopped"),
        ("lost", Stages(2), [], "lost"),
    ],
)
def test_a_job_has_one_state_from_its_start_to_its_end(recorded, stages, states, word):
    assert job_state(recorded, stages, states).word == word


def test_what_a_job_waits_for_is_told():
    state = job_state("running", Stages(4, 4, 3), [], seconds=12.0)
    assert state.text == "3 of 4 ranks in init(), for 12 s; the others import"
    assert job_state("failed", THROUGH, [], how="rank 1 failed, exit 1").text.startswith("rank 1")


def test_the_pace_is_that_of_the_last_seconds():
    pace = Pace()
    assert pace.per_s is None
    for second in range(100):
        pace.add(second, 2 * second if second < 50 else 100 + 10 * (second - 50))
    assert pace.per_s == pytest.approx(10)


def test_a_job_that_goes_back_to_a_checkpoint_has_a_new_pace():
    pace = Pace()
    for second, step in enumerate([100, 110, 120, 50, 55, 60]):
        pace.add(second, step)
    assert pace.per_s == pytest.approx(5)


def test_the_time_left_is_known_where_the_number_of_steps_is():
    logged = [LoggedStep(100.0, 10, 100), LoggedStep(110.0, 20, 100)]
    assert pace_of(logged) == 1.0
    assert seconds_left(logged, 110.0) == pytest.approx(80.0)
    assert percent(logged) == (20, 100)
    assert seconds_left([LoggedStep(1.0, 10), LoggedStep(2.0, 20)], 2.0) is None
    assert seconds_left([LoggedStep(1.0, 10, 20)], 2.0) is None
    assert seconds_left([LoggedStep(1.0, 19, 20), LoggedStep(2.0, 20, 20)], 9.0) == 0


def test_a_line_of_rc_log_tells_step_number_of_steps_and_samples():
    line = {"time": 5.0, "step": 7, "of": 90, "train/samples_per_s": 12.5, "loss": 0.5}
    assert parse_logged(json.dumps(line).encode()) == LoggedStep(5.0, 7, 90, 12.5)
    for other in ({"step": 7}, {"time": 5.0}, {"time": "x", "step": 1}, [], 3):
        assert parse_logged(json.dumps(other).encode()) is None
    assert parse_logged(b"{") is None
    line["of"] = "nan"
    assert parse_logged(json.dumps(line).encode()).of is None


def test_the_chief_of_a_job_with_servers_is_its_first_worker_that_lives():
    roles = [(0, "server 0", True), (1, "worker", False), (2, "worker", True), (3, "spare", True)]
    assert chief_among(roles) == 2
    assert chief_among([(n, role, False) for n, role, _ in roles]) == 1
    assert chief_among([(0, "", True), (1, "rank 0", True)]) is None
    kinds = [role_of(role, is_chief=n == 2) for n, role, _ in roles]
    assert kinds == ["server", "worker", "chief", "spare"]
    assert role_of("evaluator", is_chief=False) == "evaluator"


def test_the_options_of_a_program_are_its_hyper_parameters():
    words = ["--lr", "0.1", "data", "--batch=64", "--fast", "--decay", "-0.5", "-v"]
    found = [("lr", "0.1"), ("batch", "64"), ("fast", "yes"), ("decay", "-0.5"), ("v", "yes")]
    assert parameters(words) == found
