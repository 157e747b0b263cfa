"""No process of one host holds what only processes of one kernel can share with another's.

The fake hosts have one kernel and one /proc, so a wrong notion of "node" would work here, and fail
between real hosts.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

from harness import finish_job, start_job, wait_until

RANK = """
import os, sys, time
import numpy as np
import ringcomm as rc

rc.init()
rc.allreduce(np.ones(1 << 18, np.float32))
rc.allgather(np.ones(1000))
rc.broadcast(np.ones(1000))
with open("started", "a") as file:  # one write of a few bytes is not torn
    file.write(f"{os.getpid()} ")
deadline = time.monotonic() + 30
while not os.path.exists("seen") and time.monotonic() < deadline:
    time.sleep(0.01)  # the test looks into /proc meanwhile
rc.shutdown()
"""
OWNER = """
import mmap, os, time
fd = os.memfd_create("page")
os.truncate(fd, 4096)
page = mmap.mmap(fd, 4096)
print("ready", flush=True)
time.sleep(60)  # holds it until the test kills it
"""
INTRUDER = """
import mmap, os, sys, time
from ringcomm._core import open_pidfd
pid = int(sys.argv[1])
pidfd = open_pidfd(pid)
path = next(f.path for f in os.scandir(f"/proc/{pid}/fd") if "memfd" in os.readlink(f.path))
page = mmap.mmap(os.open(path, os.O_RDWR), 4096)
print("ready", flush=True)
time.sleep(60)  # holds it until the test kills it
"""


def ties_between_hosts(cluster):
    """Return in words what processes of different hosts share, or hold of each other."""
    pids = {host: cluster.pids(host) for host in cluster.hosts}
    memory = {host: set().union(*map(shared_memory, pids[host])) for host in pids}
    ties = [
        f"{one} and {other} share {name}"
        for one, other in itertools.combinations(pids, 2)
        for _, name in sorted(memory[one] & memory[other])
    ]
    for one, other in itertools.permutations(pids, 2):
        for pid in pids[one]:
            strangers = sorted(held_processes(pid) & set(pids[other]))
            ties += [f"{pid} on {one} holds a pidfd of {stranger}" for stranger in strangers]
    return ties


def shared_memory(pid):
    """Return (device and inode, name) of what `pid` can write and others see, but for /SYSV's.

    System V memory is numbered by each IPC namespace for itself.
    """
    return {each for each in mapped(pid) | memfds(pid) if not each[1].startswith("/SYSV")}


def mapped(pid):
    line = re.compile(r"^\S+ .w.s \S+ (\S+ [1-9]\d*) +(.*)$", re.MULTILINE)
    return set(line.findall(Path(f"/proc/{pid}/maps").read_text()))


def memfds(pid):
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        name = os.readlink(path)
        if name.startswith("/memfd:"):
            file = path.stat()
            device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
            found.add((f"{device} {file.st_ino}", name))
    return found


def held_processes(pid):
    """Return the processes that `pid` has a pidfd of."""
    texts = [path.read_text() for path in Path(f"/proc/{pid}/fdinfo").iterdir()]
    return {int(each) for text in texts for each in re.findall(r"^Pid:\t(\d+)$", text, re.M)}


def started_ranks(job, file, n):
    def have_started():
        assert job.poll() is None, job.communicate()[0]
        return file.exists() and file.read_text().count(" ") >= n

    wait_until(have_started, "the ranks do not start", 30)
    return {int(pid) for pid in file.read_text().split()}


def test_ranks_share_within_their_host_and_never_beyond(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RANK)
    layout = ("--map-by", "node", "--host", "h0:2,h1:2")
    job = start_job(4, script, cwd=tmp_path, options=layout, cluster=cluster)
    try:
        ranks = started_ranks(job, tmp_path / "started", 4)
        ties = ties_between_hosts(cluster)
        pairs = [sorted(ranks.intersection(cluster.pids(host))) for host in ("h0", "h1")]
        pages = [{status_pages(pid) for pid in pair} for pair in pairs]
        held = {pid: held_processes(pid) for pid in ranks}
    finally:
        (tmp_path / "seen").touch()
        ended = finish_job(job)
    assert ended.code == 0, ended.output
    assert ties == []
    # The two of one host do share, so there was something to see.
    assert [len(pair) for pair in pairs] == [2, 2]
    assert [[len(seen) for seen in each] for each in pages] == [[2]] * 2
    assert all(b in held[a] and a in held[b] for a, b in pairs)


def status_pages(pid):
    return frozenset(each for each in mapped(pid) if "ringcomm-status" in each[1])


def test_memory_and_a_pidfd_of_another_host_are_found(cluster):
    """What the test above looks for, done on purpose."""
    started = []
    for host, text in (("h0", OWNER), ("h1", INTRUDER)):
        earlier = [str(process.pid) for process in started]
        command = [*cluster.entering(host), sys.executable, "-c", text, *earlier]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "ready\n"
    ties = ties_between_hosts(cluster)
    for process in started:
        process.kill()
        process.communicate()
    owner, intruder = (process.pid for process in started)
    shared = "h0 and h1 share /memfd:page (deleted)"
    assert ties == [shared, f"{intruder} on h1 holds a pidfd of {owner}"]
