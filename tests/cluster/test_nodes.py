"""Ranks that MPI takes for one node, but that cannot open each other's pages, are not one."""

import json
import subprocess

import pytest
from harness import at_length, run_job

# Runs the script, on rank 0 in namespaces of its own, as in a container that has the host's name.
ENTER = """
import os, sys
command = [sys.executable, "script.py"]
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    command = ["unshare", *sys.argv[1:], *command]
os.execvp(command[0], command)
"""
# Nobody sees the other's processes; or, with rights of its own, rank 0 may not look into others,
# which may look into it.
SECLUSIONS = {
    "pid": ("--pid", "--fork", "--kill-child", "--mount-proc"),
    "user": ("--user", "--map-root-user"),
}
SCRIPT = """
import json
import numpy as np
import ringcomm as rc
from ringcomm.engine import world

rc.init()
transport = world._world.transport
facts = {
    "numbers": [rc.local_rank(), rc.local_size(), rc.cross_rank(), rc.cross_size()],
    "nodes": list(transport.nodes),
    "on the page": transport.page.snapshot()["local_rank"],
    "guardian": world._world.guardian is not None,
    "neighbours": sorted(transport._neighbours),
    "watched": sorted(transport._pidfds.values()),
    "sum": float(rc.allreduce(np.ones(100_000))[-1]),
}
with open(f"facts.{rc.rank()}", "w") as file:
    json.dump(facts, file)
rc.shutdown()
"""


@pytest.mark.parametrize("namespace", at_length(list(SECLUSIONS), ["pid"]))
def test_a_rank_that_cannot_see_the_others_is_a_node_of_its_own(namespace, cluster, tmp_path):
    seclusion = SECLUSIONS[namespace]
    if subprocess.run(["unshare", *seclusion, "true"], check=False).returncode != 0:
        pytest.skip(f"unshare {' '.join(seclusion)} is not permitted here")
    facts = facts_of_job(seclusion, cluster, tmp_path)
    assert [each["nodes"] for each in facts] == [[0, 1, 1, 3]] * 4
    assert [each["numbers"] for each in facts] == [
        [0, 1, 0, 3],
        [0, 2, 1, 3],
        [1, 2, 0, 1],
        [0, 1, 2, 3],
    ]
    assert [each["on the page"] for each in facts] == [0, 0, 1, 0]
    assert [each["guardian"] for each in facts] == [True, True, False, True]
    assert [each["neighbours"] for each in facts] == [[], [2], [1], []]
    assert [each["watched"] for each in facts] == [[], [2], [1], []]
    assert [each["sum"] for each in facts] == [4.0] * 4


def facts_of_job(seclusion, cluster, folder):
    (folder / "enter.py").write_text(ENTER)
    (folder / "script.py").write_text(SCRIPT)
    layout = ("--map-by", "slot", "--host", "h0:3,h1:1")
    job = run_job(4, "enter.py", *seclusion, cwd=folder, options=layout, cluster=cluster)
    assert job.code == 0, job.output
    return [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(4)]
