"""`python -m ringcomm.launch.bench.ps.child MODULE:CLASS RANK SIZE PORT ...`: see peer.py."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from ringcomm.launch.bench.ps.cases import Case
from ringcomm.launch.bench.ps.work import Work
from ringcomm.launch.lookup import lookup

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> None:
    """Do what lines on stdin say, and write what comes of it to stdout, a line each."""
    _die_with(os.getppid())
    target, rank, size, port, *arguments = argv
    store: Any = lookup(target)(int(rank), int(size), int(port), *arguments)
    gc.disable()
    _say("ready")
    work: Any = None
    for line in sys.stdin:
        said = json.loads(line)
        what = said.pop("do")
        if what == "close":
            store.close()
            return
        if what == "prepare":
            said["case"]["shape"] = tuple(said["case"]["shape"])
            work = Work(store, Case(**said["case"]))
            _say("ready")
        elif what == "n_pushes":
            _say(work.n_pushes)
        else:
            _say(getattr(work, what)(**said))


def _say(what: object) -> None:
    print(json.dumps(what), flush=True)


def _die_with(parent: int) -> None:
    """Let the kernel end this process with its parent: while stopped, it would not notice."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
