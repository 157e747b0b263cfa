"""Tells which files in /dev/shm a run of tests has made, and not another job of this machine.

A file does not say who made it once they are dead. So a process of its own notes, as files appear,
who has mapped them: a process of this run inherits a mark in its environment.
"""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

SHM = Path("/dev/shm")
MARK = "RUN_OF_TESTS"
LOOK_S = 0.05  # less than a process lives between the first use of such a file and its end
# A file that nobody maps, of a job that has died, would else cost a tenth of a core.
YOUNG_S, SELDOM_S = 1.0, 1.0
ALL_S = 0.2  # between two looks at processes of other runs for a file that nobody maps


class Watch:
    """Looks at /dev/shm from now on; all that this process starts from now on is of its run."""

    def __init__(self):
        os.environ[MARK] = str(os.getpid())
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-S", __file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self.files()

    def files(self):
        """Return the names of this run's files that are there."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return set(json.loads(self._process.stdout.readline()))

    def orphans(self):
        """Return the names of this run's files that no process has mapped any more."""
        files = self.files()
        used = mapped() if files else set()
        return {name for name in files if inode(name) not in {None, *used}}

    def end(self):
        self._process.communicate()


def main(run):
    old, own, since, looked_at, looked_at_all = set(names()), set(), {}, 0.0, 0.0
    members = Members(run)
    while True:
        is_asked = select.select([sys.stdin], [], [], LOOK_S)[0]
        there, now = set(names()), time.monotonic()
        old, own = old & there, own & there
        new = there - old - own
        has_newer, since = new > since.keys(), {name: since.get(name, now) for name in new}
        youngest = max(since.values(), default=-YOUNG_S)
        if since and (is_asked or now - youngest < YOUNG_S or now - looked_at >= SELDOM_S):
            looked_at, inodes = now, {name: inode(name) for name in since}
            users = mapped(members.pids(now), set(inodes.values()))
            own |= {name for name, i in inodes.items() if i in users}
            others = {name: i for name, i in inodes.items() if i not in users}
            if others and (is_asked or has_newer or now - looked_at_all >= ALL_S):
                looked_at_all, users = now, mapped(newest_first(), set(others.values()))
                found = {name for name, i in others.items() if i in users}
                own |= {n for n in found if any(is_of(run, pid) for pid in users[others[n]])}
                old |= found - own
        if is_asked:
            if not sys.stdin.readline():
                return
            print(json.dumps(sorted(own)), flush=True)


class Members:
    """The processes of a run; reads the environment of each a few times, not at each look."""

    def __init__(self, run):
        self.run = run
        self.known = {}  # by pid: if it is of the run, and since when it is known
        self.asked_at = 0.0

    def pids(self, now):
        if now - self.asked_at > YOUNG_S:
            self.known = {}  # another process may have the same pid by now
        self.asked_at = now
        self.known = {pid: self.known.get(pid, (False, now)) for pid in newest_first()}
        for pid, (is_member, since) in self.known.items():
            if not is_member and now - since < YOUNG_S:  # it has the mark from its exec() on
                self.known[pid] = (is_of(self.run, pid), since)
        return [pid for pid, (is_member, _) in self.known.items() if is_member]


def newest_first():
    return sorted(pids(), key=int, reverse=True)


def mapped(candidates=None, wanted=None):
    """Return {number of a file: who has mapped it}; a semaphore had another name at that time.

    Of these processes, or all; looks no further when all of the wanted files are found.
    """
    users = {}
    for pid in pids() if candidates is None else candidates:
        maps = read(pid, "maps")
        for line in maps.splitlines() if "/dev/shm/" in maps else ():
            fields = line.split()
            if len(fields) > 5 and "/dev/shm/" in fields[5]:
                users.setdefault(int(fields[4]), set()).add(pid)
        if wanted is not None and wanted <= users.keys():
            break
    return users


def is_of(run, pid):
    return pid == run or f"{MARK}={run}" in read(pid, "environ").split("\0")


def inode(name):
    """Return its number; None if it is gone."""
    try:
        return (SHM / name).stat().st_ino
    except OSError:
        return None


def names():
    """Return the names of all files in /dev/shm, whoever made them."""
    return os.listdir(SHM)


def pids():
    return filter(str.isdigit, os.listdir("/proc"))


def read(pid, name):
    try:
        with open(f"/proc/{pid}/{name}", errors="replace") as file:  # a Path costs as much again
            return file.read()
    except OSError:
        return ""


if __name__ == "__main__":
    main(sys.argv[1])
