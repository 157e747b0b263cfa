"""Ranks as real processes that a guardian watches, without MPI."""

import subprocess
import sys
import textwrap

from harness import wait_until

from ringcomm._core import StatusPage
from ringcomm.status.guardian import Ward
from ringcomm.status.page_enums import OpState

RANK = """
    import os, signal, sys, threading, time
    from ringcomm._core import StatusPage
    from ringcomm.errors import PeerFailedError
    from ringcomm.status.last_words import LastWords
    from ringcomm.status.page_enums import OpState, PageState
    page = StatusPage.create("test", "here", {rank}, 2, {rank}, {nonce})
    words = LastWords(page, on_failure=lambda failure: print("told:", failure, flush=True))
    print(page.fd, flush=True)
    sys.stdin.readline()
    page.set_step(17)
    {body}
"""


class Rank:
    """A process with a status page and hooks on its end; leads_group: as launchers start it."""

    def __init__(self, rank, body, *, leads_group=False):
        self.nonce = 1000 + rank
        body = textwrap.indent(textwrap.dedent(body), "    ").strip()
        code = textwrap.dedent(RANK.format(rank=rank, nonce=self.nonce, body=body))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0 if leads_group else None,
        )
        self.ward = Ward(self.process.pid, int(self.process.stdout.readline()), self.nonce)
        self.page = StatusPage.open(self.ward.pid, self.ward.page_fd, self.nonce)

    def go(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self):
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


# A rank that only a signal ends sleeps for longer than any test lasts.
WAITING = 'page.begin_op("allreduce[w]", 1, 4_200_000); time.sleep(60)'


def wait_until_running(rank):
    """Return once its page says that it is in an operation; another process tells nobody."""
    wait_until(lambda: rank.page.snapshot()["op_state"] == OpState.RUNNING, "it does not begin")
