"""The ranks of a job that runs in a folder, as `ringcomm top` finds them."""

import os
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
