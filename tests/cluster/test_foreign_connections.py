"""A connection to a port of MPI that sends nothing: who stands still says so of itself alone."""

import re
import subprocess
import sys

from harness import finish_job, start_job, wait_until

# Rank 0 says on which ports it listens. The loop ends once it is told to.
TRAIN = """
import logging, os
from pathlib import Path
import numpy as np
import ringcomm as rc

def opened(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of listdir()
        return ""

rc.init()
logging.getLogger("ringcomm").addHandler(logging.FileHandler(f"log.{rc.rank()}"))
if rc.rank() == 0:
    own = {opened(fd) for fd in os.listdir("/proc/self/fd")}
    sockets = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
    listening = [each[1] for each in sockets if each[3] == "0A" and f"socket:[{each[9]}]" in own]
    Path("new").write_text(" ".join(str(int(each.split(":")[1], 16)) for each in listening))
    os.rename("new", "ports")
steps = 0
while not rc.allreduce(np.array([os.path.exists("end")]), rc.MAX)[0]:
    steps += 1
print(rc.rank(), "has done", steps, flush=True)
"""
HOLD = """
import socket, sys
held = [socket.create_connection((sys.argv[1], int(port))) for port in sys.argv[2:]]
for each in held:
    each.sendall(b"x")
print("held", flush=True)
sys.stdin.read()
"""


def test_who_stands_still_inside_mpi_says_so_and_goes_on_when_it_can(cluster, tmp_path):
    (tmp_path / "script.py").write_text(TRAIN)
    hosts = ("--map-by", "slot", "--host", "h0:1,h1:1")
    job = start_job(2, "script.py", cwd=tmp_path, options=hosts, cluster=cluster)
    ports, log = tmp_path / "ports", tmp_path / "log.0"
    wait_until(ports.exists, "the job has not begun")
    ports = ports.read_text().split()
    assert ports, "rank 0 has no port: this test needs another way to hold it up"
    attack = [sys.executable, "-c", HOLD, cluster.address("h0"), *ports]
    with subprocess.Popen(
        [*cluster.entering("h2", tmp_path), *attack],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as attacker:
        assert attacker.stdout.readline() == "held\n"
        wait_until(log.read_text, "rank 0 does not say that it stands still")
        attacker.stdin.close()
    (tmp_path / "end").touch()
    done = finish_job(job)
    assert "rank 0: its own MPI has not returned for" in log.read_text()
    assert not (tmp_path / "log.1").read_text(), done.output
    assert "Error" not in done.output
    assert len(set(re.findall(r"has done (\d+)", done.output))) == 1, done.output
    assert done.code == 0, done.output
