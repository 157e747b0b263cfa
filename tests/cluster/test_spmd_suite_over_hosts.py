"""The suite of tests/mpi across hosts, however the ranks are spread over them.

A choice of it, for the time it takes: what knows of hosts, three random programs of each kind.
"""

from pathlib import Path

import pytest
from harness import at_length, run_job, suite_command

ROOT = Path(__file__).parents[2]
BY_NODE, BY_SLOT = ("--map-by", "node"), ("--map-by", "slot")
LAYOUTS = {
    "h0 h1 h2": BY_NODE,
    "h0 h1 h2 h0 h1 h2": BY_NODE,
    "h0 h0 h1 h1 h2 h2": (*BY_SLOT, "--host", "h0:2,h1:2,h2:2"),
    "h0 h0 h1 h2": (*BY_SLOT, "--host", "h0:2,h1:1,h2:1"),
}
CHOSEN = "ranks or neighbours or many_named or [0] or [1] or [2] or (large and 300001 and float)"


@pytest.mark.parametrize("layout", at_length(LAYOUTS, ["h0 h0 h1 h2"]))
def test_suite_passes_on_every_rank(layout, cluster, tmp_path):
    suite = ROOT / "tests" / "mpi" / "spmd_suite.py"
    size = len(layout.split())
    job = run_job(
        size,
        *suite_command(suite, "-k", CHOSEN),
        cwd=tmp_path,
        env={"LAYOUT": layout},
        options=LAYOUTS[layout],
        cluster=cluster,
        timeout_s=120,
    )
    assert job.code == 0, job.output
    assert job.output.count(" passed") == size, job.output
    assert "x rank" not in job.output
