"""Starts the guardian of a node: a small C++ program that outlives the ranks it watches.

Spawned with vfork and exec, never forked: a fork of a rank would keep a copy of its memory, and is
unsafe beside the threads of torch, OpenMP and MPI.
"""

from __future__ import annotations

import contextlib
import select
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ringcomm import _core
from ringcomm.descriptors import needed_for

_PROGRAM = Path(_core.__file__).with_name("ringcomm-guardian")
_START_S = 10.0
_END_S = 5.0
_FOREVER_S = 1e9  # which the program takes for "never"


@dataclass(frozen=True)
class Ward:
    """A rank to watch; its descriptors are handed over if the guardian may not open them itself."""

    pid: int
    page_fd: int  # descriptor of its status page, in that process
    nonce: int  # of the page
    handed: tuple[int, ...] = ()  # its page, and the lifeline that hangs up when it dies

    @property
    def argument(self) -> str:
        """The argument of the program for this rank."""
        return ":".join(map(str, (self.pid, self.page_fd, self.nonce, *self.handed)))


class Guardian:
    """The guardian of this node, child of the rank that started it.

    Args:
        wards: the ranks of this node.
        grace_s: how long ranks may live on after a failure.
        is_fault_tolerant: the others go on when one has failed.
        is_hydra: the launcher is MPICH's, which takes a job for a success if a rank left by C's
            _exit(0). The guardian keeps it from ending before it has seen another exit code.
    """

    def __init__(
        self,
        wards: Sequence[Ward],
        *,
        grace_s: float,
        is_fault_tolerant: bool,
        is_hydra: bool = False,
    ) -> None:
        handed = [fd for w in wards for fd in w.handed]
        with needed_for(f"start {_PROGRAM}"):
            self._process = subprocess.Popen(
                [
                    str(_PROGRAM),
                    str(int(min(grace_s, _FOREVER_S) * 1000)),
                    str(int(is_fault_tolerant)),
                    str(int(is_hydra)),
                    *(w.argument for w in wards),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
                close_fds=True,
                pass_fds=handed,
                cwd="/",
                env={},
            )
        if not self._is_watching():
            self._process.kill()
            self._process.wait()
            raise OSError(f"{_PROGRAM} did not start to watch (exit {self._process.returncode})")

    def wait(self) -> None:
        """Wait briefly for the guardian to end, as it does once all its ranks have left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        # It belongs to the job, not to this process: no warning, and no wait, if it is still there.
        if self._process.returncode is None:
            self._process.returncode = 0

    def disown(self) -> None:
        """Detach it: it runs on without this process."""
        self._process.returncode = 0

    def _is_watching(self) -> bool:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            ready, _, _ = select.select([pipe], [], [], _START_S)
            return bool(ready) and pipe.read(1) == b"w"
