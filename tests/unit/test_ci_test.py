"""ci/test, with parts that do nothing: what it says, and how it ends; what ci/setup.sh installs."""

import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest

ROOT = Path(__file__).parents[2]
# The first part ends well though Ctrl-C came meanwhile, as a program may that catches it.
SET_UP = f"""
source {ROOT}/ci/setup.sh
require_tools() {{ :; }}
install_packages() {{ :; }}
sources_id() {{ :; }}
build_wheel() {{ echo $BASHPID >"${{BASH_SOURCE%/*}}/compiler"; sleep 60; }}
make_venv() {{ [[ $# == 2 ]] || {{ sleep 1; trap "" INT; kill -INT 0; exit 0; }}; }}
"""


@pytest.mark.long
def test_ctrl_c_ends_the_gate_and_not_one_part_of_it(tmp_path):
    shutil.copy(ROOT / "ci" / "test", tmp_path / "test")
    (tmp_path / "setup.sh").write_text(SET_UP)
    done = subprocess.run(
        # Who runs these tests in the background ignores Ctrl-C, and bash would, too.
        ["env", "--default-signal=INT", "bash", tmp_path / "test"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=harness.HANG_S,
        check=False,
        start_new_session=True,
    )
    assert done.returncode == 130, done
    assert "interrupted" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == [
        "== set up .venv"
    ]
    assert not harness.is_running((tmp_path / "compiler").read_text().strip())


# Every program says how it was called, and fails if a line of BROKEN is in that.
STUBS = f"""
source {ROOT}/ci/setup.sh
ROOT=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
PYTHON=$ROOT/stub BEAT_S=1 QUIET_LIMIT_S=LIMIT
require_tools() {{ :; }}
install_packages() {{ :; }}
make_venv() {{ mkdir -p "$1/bin"; for each in python ruff mypy lint-imports mpirun; do
  ln -sf "$ROOT/stub" "$1/bin/$each"; done; ln -sf "$ROOT/PYTEST" "$1/bin/pytest"; }}
build_wheel() {{ :; }}
sources_id() {{ :; }}
install_ringcomm() {{ :; }}
"""
STUB = f"""#!/bin/sh
case "$1" in *verdict.py) exec {sys.executable} "$@";; esac
echo "called $0 $*"
while read -r each; do
  case "$0 $*" in *"$each"*) exit 3;; esac
done <<END
$BROKEN
END
case "$0 $*" in *"$SILENT"*) printf dots; exec sleep 600;; esac
"""


def run_gate(folder, broken, *arguments, silent="-none-", pytest="stub"):
    shutil.copy(ROOT / "ci" / "test", folder / "test")
    limit = "5" if pytest == "stub" else "50"
    (folder / "setup.sh").write_text(STUBS.replace("PYTEST", pytest).replace("=LIMIT", f"={limit}"))
    (folder / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "verdict.py", folder / "ci" / "verdict.py")
    for path in (folder / "stub", folder / "ci" / "sanitize"):
        path.write_text(STUB)
        path.chmod(0o755)
    return subprocess.run(
        ["bash", folder / "test", *arguments],
        env={
            "PATH": "/usr/bin:/bin",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # of other packages, which take time to load
            "TMPDIR": str(folder),
            "BROKEN": broken,
            "SILENT": silent,
            "LEFTOVERS_LIMIT_S": "0.5",
        },
        capture_output=True,
        text=True,
        timeout=harness.HANG_S,
        check=False,
    )


def test_all_steps_are_told_also_those_that_run_beside_others(tmp_path):
    done = run_gate(tmp_path, "nothing is broken")
    assert done.returncode == 0, done
    assert "all 20 steps passed" in done.stdout
    lines = done.stdout.splitlines()
    beside = lines.index("rest  | == pytest with MPICH")
    assert any(line.startswith("rest  | called") for line in lines[beside:])
    assert any(line.startswith("unit  | called") for line in lines)


SANITIZED = "ci/sanitize thread 20 random_node_operations abandoned_steps"


STEPS_THAT_FAIL = {
    ".venv-mpich/bin/pytest": "pytest with MPICH",
    "tests/with_torch": "pytest with Open MPI: torch",
    "thread 20 random_node_operations": SANITIZED,
    "sanitize compile": "ci/sanitize compile",
}


@pytest.mark.long
def test_each_step_that_fails_or_says_nothing_is_named_and_the_others_run_all_the_same(tmp_path):
    done = run_gate(tmp_path, "\n".join(STEPS_THAT_FAIL), silent="tests/unit --ignore")
    assert done.returncode == 1, done
    lines = done.stdout.splitlines()
    (path,) = tmp_path.glob("ringcomm-failures-*.txt")
    for broken, told in STEPS_THAT_FAIL.items():
        assert any(f"FAILED: {told} (exit 3)" in line for line in lines[:-20])  # where it happens
        assert lines[lines.index(f"FAILED {told} (exit 3)") + 1].startswith("    called")
        assert broken in path.read_text()
    assert "torch | == hello_allreduce.py, 4 ranks" in lines
    step = "pytest with Open MPI: unit"
    assert re.search(rf"unit  \| test: {re.escape(step)}, \d+ s: dots", done.stdout), done.stdout
    assert f"unit  | test: {step} said nothing for 5 s and gets SIGTERM" in done.stdout
    failed = {f"{told} (exit 3)" for told in STEPS_THAT_FAIL.values()} | {f"{step} (exit 143)"}
    last = " ".join(done.stdout.rpartition("FAILED: ")[2].split())  # it may be of several lines
    assert {*last.split(", ")} == failed
    assert [line for line in lines if line.startswith("== again:")] == [f"== again: {SANITIZED}"]


def test_fast_runs_each_unit_test_in_one_of_two_halves_and_no_job(tmp_path):
    (tmp_path / "tests" / "unit").mkdir(parents=True)
    files = {tmp_path / "tests" / "unit" / f"test_{each}.py" for each in "abcde"}
    for path in files:
        path.touch()
    done = run_gate(tmp_path, "test_d.py", "--fast")
    assert done.returncode == 1, done
    lines = [line for line in done.stdout.splitlines() if "FAILED" not in line]
    runs = [line.split() for line in lines if "bin/pytest" in line]
    halves = [{word for word in words if word.endswith(".py")} for words in runs]
    assert sorted(map(len, halves)) == [2, 3]
    assert set.union(*halves) == set(map(str, files))
    called = [line for line in lines if "called" in line and not line.startswith("    ")]
    assert not any(name in line for line in called for name in ("mpirun", "mpich", "mypy"))
    assert [line.split()[-1] for line in called[-6:]].count("ci/house") == 1


# pytest itself, with the plugins of tests/conftest.py, for one step.
REAL_PYTEST = f"""#!/bin/sh
case "$*" in *"/test_ps_*.py"*) exit;; *tests/unit*) ;; *) exit;; esac
PYTHONPATH={ROOT}/tests:{ROOT}/ci exec {sys.executable} -m pytest \\
  -p show_failures_plugin -p leftovers_plugin -p no:cacheprovider "$@"
"""
FAILS_ONCE = """
from pathlib import Path

def test_weather():
    path = Path(__file__ + ".was_here")
    was_here = path.exists()
    path.touch()
    assert was_here, "the first time"

def test_always():
    pass
"""
FAILS_ALWAYS = """
def test_of_a_fault():
    for number in range(40):
        print("line", number, "of its output")
    assert 6 * 9 == 42, "the answer"
"""


def run_gate_with_real_pytest(folder, **files):
    (folder / "tests" / "unit").mkdir(parents=True)
    (folder / "tests" / "unit" / "test_passes.py").write_text("def test_passes(): pass")
    for name, text in files.items():
        (folder / "tests" / "unit" / f"test_{name}.py").write_text(text)
    (folder / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\naddopts = "--import-mode=importlib"\n'
    )
    (folder / "pytest").write_text(REAL_PYTEST)
    (folder / "pytest").chmod(0o755)
    return run_gate(folder, "-none-", pytest="pytest")


@pytest.mark.at_length  # a verdict, which test_ci_verdict.py shows
def test_a_test_that_passes_alone_is_flaky_and_does_not_fail_the_gate(tmp_path):
    done = run_gate_with_real_pytest(tmp_path, weather=FAILS_ONCE)
    assert done.returncode == 0, done
    end = done.stdout.splitlines()[-60:]
    name = "tests/unit/test_weather.py::test_weather"
    assert f"FLAKY {name}" in end
    assert "E       AssertionError: the first time" in end[end.index(f"FLAKY {name}") + 1]
    (path,) = tmp_path.glob("ringcomm-failures-*.txt")
    assert f"every failure, as it was first: {path}" in end
    assert "the first time" in path.read_text()
    assert done.stdout.count("== alone: ") == 1


LEAVES = """
import mmap, os, signal, socket, subprocess, threading
kept = []

def test_leaves_much():
    name = f"/dev/shm/ci-test-{os.getpid()}"
    kept.append(os.open(name, os.O_RDWR | os.O_CREAT))
    os.ftruncate(kept[-1], 4096)
    kept.append(mmap.mmap(kept[-1], 4096))
    kept.append(subprocess.Popen(["sleep", "5"]))
    kept.append(socket.create_server(("127.0.0.1", 0)))
    kept.append(threading.Thread(target=threading.Event().wait, daemon=True, name="left"))
    kept[-1].start()
    os.environ["LEFT"] = "behind"
    signal.signal(signal.SIGUSR1, lambda *_: None)
    os.chdir("/")

def test_later():
    assert "LEFT" in os.environ
"""


@pytest.mark.long
def test_what_fails_twice_or_is_left_behind_fails_the_gate_with_its_text_at_the_end(tmp_path):
    done = run_gate_with_real_pytest(
        tmp_path, a_mess=LEAVES, weather=FAILS_ONCE, fault=FAILS_ALWAYS
    )
    for path in Path("/dev/shm").glob("ci-test-*"):
        path.unlink()
    assert done.returncode == 1, done
    end = done.stdout.splitlines()[-60:]
    fault = "tests/unit/test_fault.py::test_of_a_fault (pytest with Open MPI: unit)"
    mess = "tests/unit/test_a_mess.py (pytest with Open MPI: unit)"
    assert end[-1] == f"FAILED: {mess}, {fault}"
    said = end[end.index(f"FAILED {fault}") + 1 :]
    assert any(line.startswith("    E       AssertionError: the answer") for line in said[:16])
    assert any(line.endswith("tests/unit/test_fault.py:5: AssertionError") for line in said[:16])
    assert "FLAKY tests/unit/test_weather.py::test_weather" in end
    (path,) = tmp_path.glob("ringcomm-failures-*.txt")
    text = path.read_text()
    assert "line 39 of its output" in text
    assert "tests/unit/test_a_mess.py left behind:" in text
    for each in (
        "processes: ",
        "sleep 5",
        "shared memory: ci-test-",
        "listening ports: ",
        "environment: LEFT is new: behind",
        "working directory: cwd was ",
        "signal handlers: SIGUSR1 was ",
        "threads: ",
    ):
        assert each in text, each
    assert "test_passes" not in text
    assert done.stdout.count("== alone: tests/unit/test_a_mess.py") == 1


# A machine whose PATH has no compiler until apt-get has brought one.
APT = """
echo "$*" >>"$HERE/asked"
case "$*" in *" install "*) /bin/ln -s /bin/true "$HERE/c++";; esac
"""
TOOLS = ("bash", "cat", "dirname", "env", "python3", "true")


def require_tools(folder, *, user, sudo):
    for name in TOOLS:
        path = sys.executable if name == "python3" else shutil.which(name)
        (folder / name).symlink_to(path)
    refuses = "exit 1" if sudo is None else f'[ "$1" = -n ] && shift; {sudo}'
    programs = {
        "apt-get": APT,
        "id": f"#!/bin/sh\necho {user}\n",
        "sudo": f"#!/bin/sh\n{refuses}\n",
    }
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return subprocess.run(
        ["bash", "-c", f"source {ROOT}/ci/setup.sh; require_tools"],
        env={"PATH": str(folder), "HERE": str(folder)},
        capture_output=True,
        text=True,
        timeout=harness.HANG_S,
        check=False,
    )


@pytest.mark.parametrize(("user", "sudo"), [(0, None), (1000, 'exec "$@"')])
def test_what_is_lacking_is_installed_by_whom_nobody_asks_for_a_password(user, sudo, tmp_path):
    done = require_tools(tmp_path, user=user, sudo=sudo)
    assert done.returncode == 0, done
    update, install = (tmp_path / "asked").read_text().splitlines()
    assert update.endswith("update")
    assert install.endswith("install python3-dev python3-venv g++")


def test_others_get_the_line_that_installs_it(tmp_path):
    done = require_tools(tmp_path, user=1000, sudo=None)
    assert done.returncode == 1, done
    assert done.stderr.endswith("apt install python3-dev python3-venv g++\n")
    assert not os.path.exists(tmp_path / "asked")


# Says what it was asked to build; a compiler that warns is refused by -Werror alone.
PIP = """#!/bin/sh
case "$*" in *WERROR=ON*) echo strict >>"$HERE/built"; exit $WARNS;; esac
echo lenient >>"$HERE/built"
"""


@pytest.mark.parametrize(
    ("warns", "wanted", "built"),
    [
        (0, "OFF ON", ["strict"]),  # ci/demo, then ci/test
        (1, "OFF OFF", ["strict", "lenient"]),
        (1, "ON", ["strict"]),
    ],
)
def test_a_wheel_is_built_once_and_strictly_where_the_compiler_lets_it(
    warns, wanted, built, tmp_path
):
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PIP)
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-c", f"source {ROOT}/ci/setup.sh; BUILDER={tmp_path}/venv; "
         f"for each in {wanted}; do build_wheel sources $each; done"],
        env={"PATH": "/usr/bin:/bin", "HERE": str(tmp_path), "WARNS": str(warns)},
        capture_output=True,
        text=True,
        timeout=harness.HANG_S,
        check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == (wanted != "ON"), done
    assert (tmp_path / "built").read_text().split() == built


def cases_of(every, marker=None):
    settings = [dict(zip(every, each, strict=True)) for each in itertools.product(*every.values())]
    return [
        SimpleNamespace(
            nodeid=f"test[{each}]",
            callspec=SimpleNamespace(params=each),
            get_closest_marker={"one_wire": marker}.get,
        )
        for each in settings
    ]


def test_of_many_cases_some_are_left_in_which_each_value_is_met(monkeypatch):
    monkeypatch.delenv("FAST", raising=False)
    every = {"n": (1, 2, 3, 4), "op": ("sum", "min", "max"), "name": tuple("abcdefghijklmn")}
    cases = cases_of(every)
    few = [case.callspec.params for case in harness.few_of(cases)]
    assert len(few) == 14, "as many as there are names"
    assert all({case[one] for case in few} == set(every[one]) for one in every)
    monkeypatch.setenv("FAST", "1")
    assert len(harness.few_of(cases)) == 1


@pytest.mark.parametrize(("marker", "n_cases"), [(None, 2), ((), 1), ((False,), 2)], ids=str)
def test_a_test_that_is_not_about_the_wire_runs_on_one_of_the_two(marker, n_cases, monkeypatch):
    monkeypatch.delenv("FAST", raising=False)
    mark = None if marker is None else SimpleNamespace(args=marker)
    cases = cases_of({"wire": ("messages", "node")}, mark)
    assert len(harness.few_of(cases)) == n_cases
    both = cases_of({"wire": ("messages", "node"), "mode": ("async", "sync")}, mark)
    few = [case.callspec.params for case in harness.few_of(both)]
    assert {case["mode"] for case in few} == {"async", "sync"}


def test_work_that_has_said_nothing_yet_is_told_with_its_seconds_alone():
    said = subprocess.run(
        ["bash", "-c", f"source {ROOT}/ci/setup.sh; BEAT_S=1; sleep 1.5 | narrate build never"],
        capture_output=True,
        text=True,
        timeout=harness.HANG_S,
        check=True,
    ).stdout
    assert re.fullmatch(r"(.*: build, \d s\n)+", said), said
