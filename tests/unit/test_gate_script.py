"""ci/test, with parts that do nothing: Ctrl-C ends it."""

import shutil
import subprocess
from pathlib import Path

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
