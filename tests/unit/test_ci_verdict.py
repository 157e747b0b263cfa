"""ci/verdict.py: what is tried again, what is flaky, what fails, and how it is said."""

from dataclasses import replace

import pytest
import verdict
from cost_plugin import is_job
from verdict import (
    MAX_LINES,
    MAX_TRIED_AGAIN,
    Failure,
    Step,
    cost_table,
    cpu_seconds,
    durations,
    judge,
    report,
    to_try_again,
)

TESTS = ("run_pytest", "/venv", "/root/tests/unit", "--ignore", "/root/tests/unit/test_long.py")


def failure(name, lines=40):
    said = "\n".join(f"line {number} of {name}" for number in range(lines))
    return Failure(name, (f"/root/{name}",), f"{said}\nE   assert {name} is right")


def of_tests(*names, code=1, is_complete=True):
    return Step(
        "a", "unit", "by test", TESTS, code, 7, "dots", tuple(map(failure, names)), is_complete
    )


def again(step, name, code):
    return Step("r" + name, f"alone: {name}", f"of {step.id}", (), code, 1)


def whole(name, code, mode="whole"):
    return Step(name, name, mode, ("run_example", name), code, 3, f"output of {name}")


def test_a_test_is_tried_alone_in_the_environment_of_its_step():
    step = of_tests("test_x.py::test_y[a b]")
    assert list(to_try_again([step])) == [
        (
            "of a",
            "alone: test_x.py::test_y[a b]",
            ("run_pytest", "/venv", "/root/test_x.py::test_y[a b]"),
        )
    ]


def test_a_step_of_its_own_is_tried_again_as_a_whole():
    steps = [whole("hello", 1), whole("digits", 0)]
    assert list(to_try_again(steps)) == [("of hello", "again: hello", ("run_example", "hello"))]


@pytest.mark.parametrize(
    "step",
    [
        of_tests("x", is_complete=False),  # ended in the middle: a crash, or a hang
        of_tests("x", code=2),  # a file that cannot be imported
        of_tests("x", code=143),
        of_tests(),  # it failed, and nobody knows why
        whole("ruff", 1, mode="never"),
    ],
)
def test_a_crash_a_time_out_and_a_lint_are_never_tried_again(step):
    assert not list(to_try_again([step]))
    judged = judge([step])
    assert [each.name for each in judged.failed] == [f"{step.name} (exit {step.code})"]
    assert judged.reasons()


@pytest.mark.parametrize(("tests", "passes"), [(1, True), (3, True), (4, False)])
def test_a_few_flaky_tests_pass_and_more_fail(tests, passes):
    names = [f"test_{number}" for number in range(tests)]
    step = of_tests(*names)
    judged = judge([step, *(again(step, name, 0) for name in names)])
    assert [each.name for each in judged.flaky_tests] == names
    assert not judged.failed
    assert (not judged.reasons()) == passes


@pytest.mark.parametrize(("steps", "passes"), [(1, True), (2, False)])
def test_one_step_may_be_flaky(steps, passes):
    ran = []
    for number in range(steps):
        step = whole(f"example {number}", 1)
        ran += [step, Step(f"r{number}", f"again: {step.name}", f"of {step.id}", (), 0, 1)]
    assert (not judge(ran).reasons()) == passes


def test_what_fails_twice_fails_whatever_else_is_flaky():
    step = of_tests("test_weather", "test_fault")
    judged = judge([step, again(step, "test_weather", 0), again(step, "test_fault", 1)])
    assert judged.reasons() == ["test_fault (unit)"]
    assert [each.name for each in judged.flaky_tests] == ["test_weather"]


def test_tests_of_one_name_in_two_steps_are_judged_each_for_itself():
    one = of_tests("test_x")
    other = Step("b", "MPICH", "by test", TESTS, 1, 7, "", one.failures, True)
    judged = judge([one, other, again(one, "test_x", 0), again(other, "test_x", 1)])
    assert judged.reasons() == ["test_x (MPICH)"]
    assert len(judged.flaky_tests) == 1


def test_of_very_many_failures_some_are_tried_and_all_fail():
    names = [f"test_{number}" for number in range(50)]
    step = of_tests(*names)
    tried = list(to_try_again([step]))
    assert len(tried) == MAX_TRIED_AGAIN
    judged = judge([step, *(again(step, name, 0) for name in names[:MAX_TRIED_AGAIN])])
    assert not judged.failed
    assert len(judged.not_tried) == 50 - MAX_TRIED_AGAIN
    lines = report([step], judged, "facts", "file")
    assert f"NOT TRIED test_{MAX_TRIED_AGAIN} (unit)" in lines  # beside no failure that was
    assert judged.reasons()[-1] == "42 that failed were not tried again"


def test_a_race_in_what_was_changed_fails_the_gate():
    step = of_tests("tests/a.py::test_old", "tests/b.py::test_new")
    ran = [step, *(again(step, name.name, 0) for name in step.failures)]
    judged = judge(ran, lambda name: "b.py" in name)
    assert [each.name for each in judged.flaky_tests] == ["tests/a.py::test_old"]
    assert judged.reasons() == [
        "tests/b.py::test_new (unit, passed alone, but what it tests was changed)"
    ]


def test_the_code_that_a_test_tests_is_what_planted_faults_say_it_is(monkeypatch):
    changed = {"ringcomm/engine/core/ledger.py", "tests/unit/test_join.py", "README.md"}
    answers = {"rev-list": "2f\n1a", "diff": "\n".join(changed)}
    asked = []
    monkeypatch.setattr(verdict, "git", lambda *words: asked.append(words) or answers[words[0]])
    is_of_the_change = verdict.tests_of_the_change()
    assert asked[1] == ("diff", "--name-only", "1a")
    assert is_of_the_change("tests/unit/test_join.py::test_x[1]")
    assert is_of_the_change("tests/unit/test_ledger.py::test_y")
    assert not is_of_the_change("tests/unit/test_timeline.py::test_z")


@pytest.mark.parametrize("faults", [1, 2, 5, 20, 300])
@pytest.mark.parametrize("flaky", [0, 3, 40])
def test_the_report_fits_and_names_what_matters_first(faults, flaky):
    names = [f"test_fault_{number}" for number in range(faults)]
    weather = [f"test_weather_{number}" for number in range(flaky)]
    step = of_tests(*names, *weather)
    ran = [step, *(again(step, n, 1) for n in names), *(again(step, n, 0) for n in weather)]
    steps = [*(whole(f"a step with a long name, number {n}", 0) for n in range(20)), *ran]
    judged = judge(steps)
    lines = report(steps, judged, "commit 1234abc, 2 cores", "/tmp/failures.txt")
    assert len(lines) <= MAX_LINES
    text = "\n".join(lines)
    assert "commit 1234abc, 2 cores" in text
    assert "/tmp/failures.txt" in text
    assert "7 s unit (failed)" in " ".join(lines)
    assert lines[0] == "FAILED test_fault_0 (unit)"
    assert "\nFAILED: test_fault_0 (unit)" in text
    if faults <= 20:
        assert all(f"FAILED {name} (unit)" in lines for name in names)
    if faults <= 2:
        for name in names:
            at = lines.index(f"FAILED {name} (unit)")
            assert lines[at + 1].endswith(f"E   assert {name} is right")
            assert lines[at + 2].endswith(f"line 26 of {name}")
    if flaky:
        assert "FLAKY test_weather_0" in lines


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("E   AssertionError: \nE   assert 1 == 2", "E   assert 1 == 2"),
        ("E   AnError: Run\nE     2\nE   assert 2 == 1", "E   AnError: Run | assert 2 == 1"),
        ("E   a.CommError: rank 1 died\nat x.py:3", "E   a.CommError: rank 1 died"),
        ("E   AssertionError\nan end", "an end"),
        ("cell sigkill: 7 s\nnobody was blamed", "nobody was blamed"),
    ],
)  # fmt: skip
def test_a_failure_is_named_with_its_sentence(said, reason):
    step = Step("a", "unit", "by test", TESTS, 1, 7, "", (Failure("test_x", ("x",), said),), True)
    lines = report([step], judge([step, again(step, "test_x", 1)]), "facts", "file")
    assert lines[:2] == ["FAILED test_x (unit)", f"    {reason}"]


def test_an_assertion_far_above_the_end_is_shown_first():
    text = "E   assert 1 == 2\n" + "\n".join(f"captured {number}" for number in range(40))
    step = Step("a", "unit", "by test", TESTS, 1, 7, "", (Failure("test_x", ("x",), text),), True)
    steps = [step, again(step, "test_x", 1)]
    lines = report(steps, judge(steps), "facts", "file")
    assert lines[:2] == ["FAILED test_x (unit)", "    E   assert 1 == 2"]
    assert lines[2:17] == [f"    captured {number}" for number in range(25, 40)]


def test_times_of_the_shell_are_summed():
    assert cpu_seconds("0m0.500s 0m0.250s\n10m3.000s 1m0.250s\n") == 664.0


def test_costs_are_summed_by_step_and_shown_by_file():
    unit = replace(whole("unit", 0), costs={"unit/a.py": (2.5, 0), "unit/b.py": (1.0, 3)})
    jobs = replace(whole("jobs", 0), costs={"mpi/c.py": (20.0, 7)})
    assert durations([unit, jobs, whole("lint", 0)]) == [
        "steps: 3 s unit (4 s of a core, 3 jobs), 3 s jobs (20 s of a core, 7 jobs), 3 s lint"
    ]
    assert cost_table([unit, jobs])[1:] == [
        " 20.0     7  mpi/c.py (jobs)",
        "  2.5     0  unit/a.py (unit)",
        "  1.0     3  unit/b.py (unit)",
    ]


@pytest.mark.parametrize(
    ("command", "is_one"),
    [
        (["/venv/bin/mpirun", "-np", "2", "python"], True),
        (["ip", "netns", "exec", "h0", "/venv/bin/ringcomm", "run", "-np", "2"], True),
        (["/venv/bin/ringcomm", "top", "run"], False),
        (["python", "mpirun.py"], False),
        ("mpirun -np 2 python", False),  # of a shell: not looked into
    ],
)
def test_a_job_is_a_launcher_with_ranks(command, is_one):
    assert is_job(command) == is_one
