"""A death on one host is heard on all, and reported by the guardian of that host alone."""

import re

from harness import run_script

SCRIPT = """
import glob, os, signal, sys, time
import numpy as np
import ringcomm as rc

rc.init()
x = np.ones(1 << 16, np.float32)
try:
    for step in range(1_000_000):
        rc.allreduce_(x, rc.MAX)
        if step == 20 and rc.rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
except rc.PeerFailedError as error:
    open(f"heard.{rc.rank()}", "w").write(str(error.rank))
    deadline = time.monotonic() + 10  # a launcher ends the others once one of them ends
    while time.monotonic() < deadline and len(glob.glob("heard.*")) < 5:
        time.sleep(0.01)
    raise
"""


def test_a_kill_on_another_host_is_heard_by_all(cluster, tmp_path):
    layout = ("--with-ft", "ulfm", "--map-by", "slot", "--host", "h0:2,h1:2,h2:2")
    job = run_script(6, SCRIPT, cwd=tmp_path, options=layout, cluster=cluster)
    heard = {path.name: path.read_text() for path in tmp_path.glob("heard.*")}
    assert heard == {f"heard.{rank}": "3" for rank in (0, 1, 2, 4, 5)}, job.output
    # The exit code is no witness: across hosts mpirun 5 may end with 0 after a death.
    reports = re.findall(r"^x rank \d.*", job.output, re.MULTILINE)
    assert len(reports) == 1, job.output
    assert re.match(
        r"x rank 3 \(.*host h1.*(killed by SIGKILL|ended without a word)", reports[0]
    ), reports
