"""`ringcomm run` over several hosts: logs and exit codes of ranks that are elsewhere."""

import json
import os
import re
import shlex
import subprocess

import pytest
from fakecluster import running
from harness import BIN, HANG_S, at_length, job_environment, run_command, wait_until

TRAIN = """
import os, signal, socket, sys
import numpy as np
import ringcomm as rc
rc.init()
print(socket.gethostname(), os.environ["RANK"], os.environ["LOCAL_RANK"],
      os.environ["MASTER_ADDR"], os.environ["RINGCOMM_TIMEOUT_S"], flush=True)
rc.barrier()  # all have said it
if len(sys.argv) > 1 and rc.rank() == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
assert rc.allreduce(np.ones(1))[0] == 4
"""


def run(cluster, folder, *arguments, env=None, **options):
    job = command(cluster, folder, TRAIN, *arguments, **options)
    return subprocess.run(
        **job | {"env": job["env"] | (env or {})},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )


HOSTS = ("-H", "h0:2,h1:1,h2:1")


def command(cluster, folder, program, *arguments, hosts=HOSTS):
    (folder / "train.py").write_text(program)
    reach = cluster.launch_options(is_mpich=False)
    reach = [str(each) for each in reach[reach.index("--prtemca") :]]  # not the host file
    return {
        "args": [
            *cluster.entering("h0", folder),
            *(BIN / "ringcomm", "run", "--run-folder", "run", *hosts),
            *("--launcher-options", shlex.join(reach), "train.py", *arguments),
        ],
        "env": job_environment({"TMPDIR": str(folder), "RINGCOMM_TIMEOUT_S": "60"}),
        "stdin": subprocess.DEVNULL,
    }


PLACES = ["h0 0 0", "h0 1 1", "h1 2 0", "h2 3 0"]


def test_a_pbs_job_has_the_hosts_of_its_file_and_the_logs_of_all_in_one_folder(cluster, tmp_path):
    (tmp_path / "nodes").write_text("h0\nh0\nh1\nh2\n")
    env = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "7.h0"}
    job = run(cluster, tmp_path, hosts=(), env=env)
    assert job.returncode == 0, job
    for rank, place in enumerate(PLACES):
        text = f"{place} h0 60"
        assert (tmp_path / "run" / f"rank-{rank}.log").read_text() == f"{text}\n"
        assert f"[{rank}] {text}" in job.stdout


@pytest.mark.parametrize("rank", at_length([2, 3], [3]))
def test_the_exit_code_is_that_of_a_rank_on_another_host(rank, cluster, tmp_path):
    job = run(cluster, tmp_path, str(rank))
    assert "4 ranks on h0:2, h1:1, h2:1" in job.stderr, job
    for other, place in enumerate(PLACES):
        assert f"[{other}] {place} h0 60" in job.stdout, job
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


RING = """
import os, time
import numpy as np
import ringcomm as rc
rc.init()
x = np.ones(1_000_000, np.float32)
for step in range(10**9):
    rc.allreduce_(x, name="gradients")
    rc.log(step=step, loss=1 / (step + 1))
    if step == 6:
        open(f"{rc.rank()}.here", "w").close()
    if rc.broadcast_object(os.path.exists("enough")):
        break
"""


@pytest.fixture
def ring(cluster, tmp_path):
    """Yield a function that fails if the job, 4 ranks on 3 hosts that exchange 4 MB, has ended."""
    said = tmp_path / "job.txt"
    with said.open("w") as file:
        job = subprocess.Popen(**command(cluster, tmp_path, RING), stdout=file, stderr=file)

    def goes_on():
        assert job.poll() is None, said.read_text()
        return True

    there = [tmp_path / "run" / f"host-h{i}.json" for i in range(3)]
    there += [tmp_path / f"{rank}.here" for rank in range(4)]
    wait_until(
        lambda: goes_on() and all(each.exists() for each in there), lambda: os.listdir(tmp_path)
    )
    yield goes_on
    (tmp_path / "enough").touch()
    assert job.wait(HANG_S) == 0, said.read_text()


def top(cluster, folder, *options):
    """Return what `ringcomm top` says on h0 of the run, if it sees no process of any host."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc"]  # fake hosts share pids, real ones not
    return run_command(
        [*cluster.entering("h0", folder), *alone, BIN / "ringcomm", "top", "run", *options],
        env=job_environment(),
    ).stdout


def test_the_ranks_of_all_hosts_and_a_slow_link_are_seen_from_one_host(ring, cluster, tmp_path):
    shown = {}

    def are_under_way():  # a host reports now and then
        assert ring()
        found = json.loads(top(cluster, tmp_path, "--json") or "[]")
        shown.update({each["rank"]: (each["host"], each["is_bad"]) for each in found})
        return len(found) == 4 and all(each["step"] > 5 for each in found)

    wait_until(are_under_way, lambda: shown)
    assert shown == {0: ("h0", False), 1: ("h0", False), 2: ("h1", False), 3: ("h2", False)}
    balanced = top(cluster, tmp_path, "--once", "--interval", "4")
    assert "4 of 4 ranks live on h0, h1, h2" in balanced
    assert "link" not in balanced
    cluster.set_rate("h1", "40mbit")
    try:
        slow = "the link of host h1 is slow: "
        wait_until(
            lambda: ring() and slow in top(cluster, tmp_path, "--once", "--interval", "4"),
            (tmp_path / "run" / "host-h0.json").read_text,
        )
    finally:
        cluster.set_rate("h1", cluster.rate)


LOST = """
import os
import numpy as np
import ringcomm as rc
rc.init()
rc.barrier()
open(f"started.{rc.rank()}", "w").close()
while True:
    rc.allreduce(np.ones(3))
"""


@pytest.mark.at_length  # takes 25 s: a host that does not answer has 15 s to do so
def test_a_job_ends_though_the_launcher_waits_for_a_host_that_has_lost_its_power(cluster, tmp_path):
    with running(f"lost-{os.getpid()}", 3, cluster.rate) as doomed:
        job = command(doomed, tmp_path, LOST)
        at = job["args"].index("--run-folder")
        job["args"][at:at] = ["--grace", "4"]
        job["env"]["RINGCOMM_TIMEOUT_S"] = "5"  # also of the start
        process = subprocess.Popen(**job, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        files = [tmp_path / f"started.{rank}" for rank in range(4)]
        wait_until(lambda: all(path.exists() for path in files), "no start", 60)
        doomed.crash("h2")
        try:
            _, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
    end = json.loads((tmp_path / "run" / "end.json").read_text())
    assert (process.returncode, end["code"]) == (1, 1), err
    assert "h2 cannot be reached: the launcher is ended" in err
    assert re.search(r"^x rank [012] .* raised CommTimeoutError", err, re.MULTILINE), err
