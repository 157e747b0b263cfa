"""What becomes of one host is heard on the others: mpirun cannot be trusted to tell.

Across hosts the mpirun of Open MPI 5 may end with 0 after a death, or hang.
"""

import os
import re

from fakecluster import running
from harness import run_script, start_job, wait_until

KILL = """
import glob, os, signal, sys, time
import numpy as np
import ringcomm as rc

rc.init()
x = np.ones(1 << 16, np.float32)
try:
    for step in range(1_000_000):
        rc.allreduce_(x, rc.MAX)
        if step == 20 and rc.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
except rc.PeerFailedError as error:
    open(f"heard.{rc.rank()}", "w").write(str(error.rank))
    deadline = time.monotonic() + 10  # a launcher ends the others once one of them ends
    while time.monotonic() < deadline and len(glob.glob("heard.*")) < 3:
        time.sleep(0.01)  # the others' files are all that tells of them now
    raise
"""
POWER_LOSS = """
import os
import numpy as np
import ringcomm as rc

rc.init()
rc.barrier()
open(f"started.{rc.rank()}", "w").close()
try:
    while True:
        rc.allreduce(np.ones(1000))
except rc.CommTimeoutError as error:
    with open(f"writing.{rc.rank()}", "w") as file:
        file.write(str(error))
    os.rename(file.name, f"heard.{rc.rank()}")
    raise
"""


def test_a_kill_on_another_host_is_heard_by_all(cluster, tmp_path):
    layout = ("--with-ft", "ulfm", "--map-by", "slot", "--host", "h0:1,h1:2,h2:1")
    job = run_script(4, KILL, cwd=tmp_path, options=layout, cluster=cluster)
    heard = {path.name: path.read_text() for path in tmp_path.glob("heard.*")}
    assert heard == {f"heard.{rank}": "2" for rank in (0, 1, 3)}, job.output
    reports = re.findall(r"^x rank \d.*", job.output, re.MULTILINE)
    assert len(reports) == 1, job.output
    assert re.match(
        r"x rank 2 \(.*host h1.*(killed by SIGKILL|ended without a word)", reports[0]
    ), reports


def test_hosts_that_lose_power_in_silence_are_named_at_the_deadline(cluster, tmp_path):
    (tmp_path / "script.py").write_text(POWER_LOSS)
    layout = ("--with-ft", "ulfm", "--map-by", "slot", "--host", "h0:2,h1:2")
    env = {"RINGCOMM_TIMEOUT_S": "4"}  # also of the start
    with running(f"power-{os.getpid()}", 2, cluster.rate) as doomed:
        job = start_job(4, "script.py", cwd=tmp_path, env=env, options=layout, cluster=doomed)
        try:
            wait_for_files(tmp_path, "started", range(4))
            doomed.crash("h1")
            wait_for_files(tmp_path, "heard", range(2))
        finally:
            doomed.kill("h0")  # mpirun with it, which may hang now
            output, _ = job.communicate()
    for rank in range(2):
        heard = (tmp_path / f"heard.{rank}").read_text()
        assert "for ranks 2, 3, which did not answer" in heard, output


def wait_for_files(folder, name, ranks):
    def missing():
        return [rank for rank in ranks if not (folder / f"{name}.{rank}").exists()]

    wait_until(lambda: not missing(), lambda: f"nothing {name} by ranks {missing()}", 30)
