"""`ringcomm run` over several hosts: logs and exit codes of ranks that are elsewhere."""

import json
import shlex
import subprocess

import pytest
from harness import BIN, HANG_S, job_environment

TRAIN = """
import os, signal, socket, sys
import numpy as np
import ringcomm as rc
rc.init()
print(socket.gethostname(), os.environ["RANK"], os.environ["LOCAL_RANK"],
      os.environ["MASTER_ADDR"], os.environ["RINGCOMM_TIMEOUT_S"], flush=True)
if len(sys.argv) > 1 and rc.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
assert rc.allreduce(np.ones(1))[0] == 4
"""


def run(cluster, folder, *arguments):
    (folder / "train.py").write_text(TRAIN)
    reach = cluster.launch_options(is_mpich=False)
    reach = [str(each) for each in reach[reach.index("--prtemca") :]]  # not the host file
    return subprocess.run(
        [
            *cluster.entering("h0", folder),
            *(BIN / "ringcomm", "run", "--run-folder", "run", "-H", "h0:2,h1:1,h2:1"),
            *("--launcher-options", shlex.join(reach), "train.py", *arguments),
        ],
        env=job_environment({"TMPDIR": str(folder), "RINGCOMM_TIMEOUT_S": "60"}),
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_logs_of_all_hosts_are_in_one_folder_and_each_rank_gets_the_variables(cluster, tmp_path):
    job = run(cluster, tmp_path)
    assert job.returncode == 0, job
    expected = ["h0 0 0", "h0 1 1", "h1 2 0", "h2 3 0"]
    for rank, place in enumerate(expected):
        text = f"{place} h0 60"
        assert (tmp_path / "run" / f"rank-{rank}.log").read_text() == f"{text}\n"
        assert f"[{rank}] {text}" in job.stdout
    assert "4 ranks on h0:2, h1:1, h2:1" in job.stderr


@pytest.mark.parametrize("rank", [2, 3])
def test_the_exit_code_is_that_of_a_rank_on_another_host(rank, cluster, tmp_path):
    job = run(cluster, tmp_path, str(rank))
    end = json.loads((tmp_path / "run" / "end.json").read_text())
    assert (job.returncode, end["rank"]) == (137, rank), job
    assert f"x rank {rank} (host h{rank - 1}" in job.stderr


def test_ranks_of_hosts_that_do_not_see_the_folder_are_heard_all_the_same(cluster, tmp_path):
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    cover = ["mount", "-t", "tmpfs", "tmpfs", hidden]
    for host in ("h1", "h2"):
        subprocess.run([*cluster.entering(host), *cover], check=True)
    try:
        (tmp_path / "train.py").write_text(TRAIN)
        for host in ("h1", "h2"):
            copy = ["cp", tmp_path / "train.py", hidden]
            subprocess.run([*cluster.entering(host), *copy], check=True)
        job = run(cluster, hidden)
        assert job.returncode == 0, job
        assert "host h1 does not see" in job.stderr
        assert "h1 2 0 h0 60" in job.stderr
        assert "[1] h0 1 1 h0 60" in job.stdout
    finally:
        for host in ("h1", "h2"):
            subprocess.run([*cluster.entering(host), "umount", hidden], check=True)
