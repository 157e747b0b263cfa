"""Ranks that MPI takes for one node, but that cannot open each other's pages, are not one."""

import json

from harness import run_job

# Starts the script; the ranks that are named first get a pid namespace and a /proc of their own,
# as in a container that has the host's name.
ENTER = """
import os, sys
secluded, *command = sys.argv[1:]
command = [sys.executable, *command]
if os.environ["OMPI_COMM_WORLD_RANK"] in secluded:
    command = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command]
os.execvp(command[0], command)
"""
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


def facts_of_job(secluded, layout, cluster, folder):
    (folder / "enter.py").write_text(ENTER)
    (folder / "script.py").write_text(SCRIPT)
    job = run_job(
        4,
        *("enter.py", secluded, "script.py"),
        cwd=folder,
        options=("--map-by", "slot", "--host", layout),
        cluster=cluster,
    )
    assert job.code == 0, job.output
    return [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(4)]


def test_a_rank_in_a_pid_namespace_of_its_own_is_a_node_of_its_own(cluster, tmp_path):
    facts = facts_of_job("0", "h0:3,h1:1", cluster, tmp_path)
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
