"""A long run keeps its memory and its descriptors."""

from harness import run_script

SCRIPT = """
import os
import numpy as np
import ringcomm as rc

rc.init()
group = rc.Group(range(rc.size()))
parts = [np.ones(n, np.float32) for n in (10, 1000, 30_000)]
right, left = (rc.rank() + 1) % rc.size(), (rc.rank() - 1) % rc.size()
out = np.empty(10, np.float32)

def step(number):
    handles = [rc.allreduce_async_(x, rc.AVERAGE, name=f"part {i}") for i, x in enumerate(parts)]
    rc.allreduce(parts[0])
    if number % 10 == 0:
        rc.broadcast_async(parts[1], group=group)  # dropped
        rc.sendrecv(parts[0], right, out, left)
        rc.allgather_object(number)
        if number % 100 == 0:
            try:
                rc.allreduce(np.ones(2 + rc.rank()))
            except rc.MismatchError:
                pass
    for handle in handles:
        handle.wait()

def footprint():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd"))

for number in range(10_000):
    step(number)
    if number == 2000:
        before = footprint()
after = footprint()
grown = (after[0] - before[0]) / 2**20
report = f"rank {rc.rank()} grew by {grown:.2f} MiB, {after[1] - before[1]} descriptors"
os.write(1, report.encode() + b"\\n")
assert grown < 5, (before, after)
assert after[1] <= before[1], (before, after)
rc.shutdown()
"""


def test_between_steps_2000_and_10000_memory_grows_by_less_than_5_mib(tmp_path):
    job = run_script(2, SCRIPT, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    assert job.output.count("descriptors") == 2, job.output
