"""More than 2 GiB in one call: counts do not fit a C int, and memory stays bounded."""

from pathlib import Path

import pytest
from harness import run_script

COUNT = (1 << 31) + 4097
NEEDED_GIB = 9
BODY = f"""
import resource
import numpy as np
import ringcomm as rc

rc.init()
COUNT, BLOCK = {COUNT}, (1 << 26) - 5  # no power of two: what is sent in pieces must not repeat
pattern = np.random.default_rng(1).integers(-128, 128, BLOCK, np.int8)
x = np.empty(COUNT, np.int8)
for start in range(0, COUNT, BLOCK):
    part = x[start : start + BLOCK]
    np.multiply(pattern[: part.size], rc.rank() + 1, out=part)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
rc.allreduce_(x)
for start in range(0, COUNT, BLOCK):
    part = x[start : start + BLOCK]
    assert np.array_equal(part, pattern[: part.size] * np.int8(3)), start
if rc.rank() == 1:
    x[-5:] = 7
rc.broadcast_(x, 1)
assert (x[-5:] == 7).all()
extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
print(f"extra memory {{extra / COUNT:.2f}}", flush=True)
assert extra < 0.5 * COUNT + (200 << 20), extra  # the chunk that arrives, and some small things
"""


def available_gib():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / (1 << 20)
    return 0


@pytest.mark.at_length
def test_more_than_2_gib_in_one_call(tmp_path):
    # Two ranks hold 2 GiB each and 1 GiB of scratch: less memory would swap or be killed.
    if available_gib() < NEEDED_GIB:
        pytest.skip(f"needs {NEEDED_GIB} GiB of memory, {available_gib():.1f} are available")
    job = run_script(2, BODY, cwd=tmp_path, timeout_s=180)
    assert job.code == 0, job.output
    assert job.output.count("extra memory") == 2
