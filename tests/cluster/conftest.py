"""Three fake hosts for the tests of this folder; skipped, with the reason, where none can be."""

import os
import signal
import time

import pytest
from fakecluster import obstacle, running
from harness import IS_MPICH


@pytest.fixture(scope="session")
def cluster():
    if IS_MPICH:
        pytest.skip("MPICH's mpiexec knows none of the options that lay out these ranks")
    if reason := obstacle():
        pytest.skip(reason)
    with running(f"pytest-{os.getpid()}", 3, "200mbit") as hosts:
        yield hosts


@pytest.fixture(autouse=True)
def storms_start_fast(surroundings_of_jobs):
    """Let ranks of ci/storms.py and ci/ps_storms.py, too, load of numpy what they use."""


@pytest.fixture(autouse=True)
def nothing_is_left_on_a_host(cluster):
    """Fail the test that leaves a process on a host, or a file in its /dev/shm."""
    yield
    deadline = time.monotonic() + 5
    while left := leftovers(cluster):
        if time.monotonic() > deadline:
            for host in cluster.hosts:
                for pid in cluster.pids(host):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"left behind: {left}")
        time.sleep(0.02)  # the end of a process of a job that is over is told to nobody


def leftovers(cluster):
    found = {host: cluster.pids(host) + os.listdir(cluster.shm(host)) for host in cluster.hosts}
    return {host: each for host, each in found.items() if each}
