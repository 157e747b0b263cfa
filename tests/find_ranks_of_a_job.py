"""The ranks of a job that runs in a folder, as `ringcomm top` finds them."""

import os
import re
import signal
from pathlib import Path

from harness import wait_until

from ringcomm._core import monotonic_ns
from ringcomm.launch.watch.find_ranks import Ranks


def ranks_in(folder):
    """Return samples of the live ranks whose program runs in this folder, by rank."""
    ranks = Ranks()
    ranks.search()
    return {
        each.rank: each
        for each in ranks.sample(monotonic_ns())
        if not each.is_over and _folder_of(each.page["pid"]) == folder
    }


def _folder_of(pid):
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:  # a rank of another job has ended just now
        return None


def await_steps(folder, size):
    def have_stepped():
        found = ranks_in(folder)
        return len(found) == size and all(each.page["step"] for each in found.values())

    wait_until(have_stepped, lambda: ranks_in(folder))


def await_caught(folder, size):
    """Return once all ranks catch SIGUSR1, of which the kernel tells."""

    def is_caught():
        pids = [each.page["pid"] for each in ranks_in(folder).values()]
        masks = [
            int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
            for pid in pids
        ]
        return len(pids) == size and all(mask >> signal.SIGUSR1 - 1 & 1 for mask in masks)

    wait_until(is_caught, "signals are not caught")
