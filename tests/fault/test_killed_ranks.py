"""SIGKILL in mid-collective or between messages: the others hear of it at once."""

import pytest
from harness import HANG_S, IS_MPICH, PROMPTLY_S, at_length, run_script

SCRIPT = """
import glob, os, random, signal, sys, threading, time
import numpy as np
import ringcomm as rc

form, seed = sys.argv[1], int(sys.argv[2])
rc.init()
x = np.ones(1 << 20, np.float32)
out, parts = np.empty_like(x), np.array_split(x, 12)

def synchronous():
    rc.allreduce_(x)

def named():
    order = list(range(12))
    random.shuffle(order)
    for handle in [rc.allreduce_async_(parts[i], rc.MAX, name=f"n{i}") for i in order]:
        handle.wait()

def grouped():
    for ranks in ([0, 1, 2, 3], [2, 3, 1, 0]):
        rc.alltoall(x, group=groups[tuple(ranks)])

def messages():
    left, right = (rc.rank() - 1) % 4, (rc.rank() + 1) % 4
    rc.sendrecv(x, right, out, left)
    rc.sendrecv(parts[0][:9], left, out[:9], rc.ANY_SOURCE, sendtag=1, recvtag=1)

groups = {r: rc.Group(r) for r in ((0, 1, 2, 3), (2, 3, 1, 0))}
rc.barrier()
if rc.rank() == 2:
    after_s = random.Random(seed).uniform(0, 0.2)
    threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
try:
    while True:
        {"sync": synchronous, "named": named, "grouped": grouped, "messages": messages}[form]()
except rc.PeerFailedError as error:
    open(f"heard.{rc.rank()}", "w").write(str(error.rank))
    deadline = time.monotonic() + 10  # a launcher ends the others once one of them ends
    while time.monotonic() < deadline and len(glob.glob("heard.*")) < 3:
        time.sleep(0.01)
    raise
"""


FORMS = ["sync", "named", "grouped", "messages"]
# test_failing_jobs.py has a kill among sums that wait, too.
IN_GATE = FORMS[1:]


@pytest.mark.parametrize("form", ["named"] if IS_MPICH else at_length(FORMS, IN_GATE))
@pytest.mark.parametrize("seed", at_length(range(3), range(1)))
def test_a_kill_in_mid_operation_is_heard_by_all(form, seed, tmp_path):
    # Only under ULFM does a launcher leave the others the time to say what they heard.
    options = () if IS_MPICH else ("--with-ft", "ulfm")
    job = run_script(4, SCRIPT, form, seed, cwd=tmp_path, options=options, timeout_s=HANG_S)
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "x rank 2 " in job.output, job.output
    if not IS_MPICH:
        heard = {path.name: path.read_text() for path in tmp_path.glob("heard.*")}
        assert heard == {f"heard.{r}": "2" for r in (0, 1, 3)}, job.output
