"""ci/test, with parts that do nothing: what it says, and how it ends."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The first part ends well though Ctrl-C came meanwhile, as a program may that catches it.
SET_UP = """
ROOT=$(dirname "${BASH_SOURCE[0]}")
say() { printf '%s: %s\\n' "${0##*/}" "$*"; }
die() { say "$*" >&2; exit 1; }
require_tools() { :; }
make_venv() { kill -INT $$; exit 0; }
"""


def test_ctrl_c_ends_the_gate_and_not_one_part_of_it(tmp_path):
    shutil.copy(ROOT / "ci" / "test", tmp_path / "test")
    (tmp_path / "setup.sh").write_text(SET_UP)
    done = subprocess.run(
        ["bash", tmp_path / "test"],
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 130, done
    assert "interrupted" in done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("==")] == [
        "== set up .venv"
    ]


# Every program says how it was called, and fails if BROKEN is in that.
STUBS = """
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PYTHON=$ROOT/stub
say() { printf '%s: %s\\n' "${0##*/}" "$*"; }
die() { say "$*" >&2; exit 1; }
require_tools() { :; }
make_venv() { mkdir -p "$1/bin"; for each in pytest python ruff mypy lint-imports mpirun; do
  ln -sf "$ROOT/stub" "$1/bin/$each"; done; }
install_ringcomm() { :; }
"""
STUB = """#!/bin/sh
echo "called $0 $*"
case "$0 $*" in *"$BROKEN"*) exit 3;; esac
"""


def run_gate(folder, broken):
    shutil.copy(ROOT / "ci" / "test", folder / "test")
    (folder / "setup.sh").write_text(STUBS)
    (folder / "ci").mkdir()
    for path in (folder / "stub", folder / "ci" / "sanitize"):
        path.write_text(STUB)
        path.chmod(0o755)
    return subprocess.run(
        ["bash", folder / "test"],
        env={"PATH": "/usr/bin:/bin", "BROKEN": broken},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_all_steps_are_told_also_those_that_run_beside_others(tmp_path):
    done = run_gate(tmp_path, "nothing is broken")
    assert done.returncode == 0, done
    assert "all 13 steps passed" in done.stdout
    assert "called" in done.stdout.partition("== pytest with MPICH")[2]


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        (".venv-mpich/bin/pytest", "pytest with MPICH"),
        ("tests/unit", "pytest with Open MPI: ranks as threads"),
        ("thread 40 node", "ci/sanitize thread 40 node abandon"),
    ],
)
def test_a_step_that_fails_is_named_and_fails_the_gate(broken, told, tmp_path):
    done = run_gate(tmp_path, broken)
    assert done.returncode == 1, done
    assert f"FAILED: {told}" in done.stderr
    assert "== hello_allreduce.py" in done.stdout  # the others run all the same
