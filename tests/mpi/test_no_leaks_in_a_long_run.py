"""A long run keeps its memory and its descriptors."""

from harness import at_length, run_script

N_STEPS, LIMIT_MIB = at_length((10_000, 5), (2000, 1))
SCRIPT = """
import os, sys
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

for number in range(int(sys.argv[1])):
    step(number)
    if number == 500:
        before = footprint()
after = footprint()
grown = (after[0] - before[0]) / 2**20
report = f"rank {rc.rank()} grew by {grown:.2f} MiB, {after[1] - before[1]} descriptors"
os.write(1, report.encode() + b"\\n")
assert grown < float(sys.argv[2]), (before, after)
assert after[1] <= before[1], (before, after)
rc.shutdown()
"""


def test_after_500_steps_memory_grows_by_less_than_700_bytes_a_step(tmp_path):
    job = run_script(2, SCRIPT, N_STEPS, LIMIT_MIB, cwd=tmp_path, timeout_s=120)
    assert job.code == 0, job.output
    assert job.output.count("descriptors") == 2, job.output
