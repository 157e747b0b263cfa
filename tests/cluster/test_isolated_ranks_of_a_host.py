"""Ranks of one host that may not look into each other: who shares memory, and who is watched."""

import json
import subprocess

import pytest
from harness import run_job

# Runs the script, on rank 0 in namespaces of its own, as in a container that has the host's name.
ENTER = """
import os, sys
command = [sys.executable, "script.py"]
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    command = ["unshare", *sys.argv[1:], *command]
os.execvp(command[0], command)
"""
# Nobody sees the other's processes; or, with rights of its own, rank 0 may not look into others,
# which may look into it: then descriptors are handed over.
SECLUSIONS = {
    "pid": ("--pid", "--fork", "--kill-child", "--mount-proc"),
    "user": ("--user", "--map-root-user"),
}
SCRIPT = """
import json
import numpy as np
import ringcomm as rc
from ringcomm.engine.api import world

rc.init()
transport = world.current().transport
facts = {
    "numbers": [rc.local_rank(), rc.local_size(), rc.cross_rank(), rc.cross_size()],
    "nodes": list(transport.nodes),
    "on the page": transport.page.snapshot()["local_rank"],
    "guardian": world.current().guardian is not None,
    "neighbours": transport.presence._neighbours.ranks,
    "watched": transport.presence._neighbours.watched,
    "sum": float(rc.allreduce(np.ones(100_000))[-1]),
}
with open(f"facts.{rc.rank()}", "w") as file:
    json.dump(facts, file)
rc.shutdown()
"""


NUMBERS = [[0, 3, 0, 2], [1, 3, 0, 1], [2, 3, 0, 1], [0, 1, 1, 2]]  # the launcher's


def test_a_rank_that_cannot_see_the_others_is_a_node_of_its_own(cluster, tmp_path):
    facts, output = facts_of_job("pid", cluster, tmp_path)
    assert [each["nodes"] for each in facts] == [[0, 1, 1, 3]] * 4
    assert [each["numbers"] for each in facts] == NUMBERS
    assert [each["on the page"] for each in facts] == [0, 1, 2, 0]
    assert [each["guardian"] for each in facts] == [True, True, False, True]
    assert [each["neighbours"] for each in facts] == [[], [2], [1], []]
    assert [each["watched"] for each in facts] == [[], [2], [1], []]
    assert [each["sum"] for each in facts] == [4.0] * 4
    assert output.count("cannot share memory with rank") == 1
    assert "another pid namespace" in output
    assert "So ranks 1, 2 of this host and the others exchange messages" in output


def test_a_rank_with_users_of_its_own_is_of_the_same_node(cluster, tmp_path):
    facts, output = facts_of_job("user", cluster, tmp_path)
    assert [each["nodes"] for each in facts] == [[0, 0, 0, 3]] * 4
    assert [each["numbers"] for each in facts] == NUMBERS
    assert [each["guardian"] for each in facts] == [True, False, False, True]
    assert [each["watched"] for each in facts] == [[1, 2], [0, 2], [0, 1], []]
    assert [each["sum"] for each in facts] == [4.0] * 4
    assert "cannot share" not in output


def facts_of_job(namespace, cluster, folder):
    seclusion = SECLUSIONS[namespace]
    if subprocess.run(["unshare", *seclusion, "true"], check=False).returncode != 0:
        pytest.skip(f"unshare {' '.join(seclusion)} is not permitted here")
    (folder / "enter.py").write_text(ENTER)
    (folder / "script.py").write_text(SCRIPT)
    layout = ("--map-by", "slot", "--host", "h0:3,h1:1")
    job = run_job(4, "enter.py", *seclusion, cwd=folder, options=layout, cluster=cluster)
    assert job.code == 0, job.output
    return [json.loads((folder / f"facts.{rank}").read_text()) for rank in range(4)], job.output
