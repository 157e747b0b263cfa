"""Starts the guardian of a node, a small C++ program that outlives the ranks that it watches.

The guardian is started with vfork and exec. A plain fork would keep a copy of the rank's memory,
and is not safe with the threads of torch, OpenMP and MPI.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
from collections.abc import Sequence
from typing import NamedTuple

import ringcomm._core
from ringcomm.launched.child_marks import run_file, run_folder_id
from ringcomm.launched.launcher import launched_rank
from ringcomm.open_errors import needed_for

_PROGRAM = os.path.join(os.path.dirname(ringcomm._core.__file__), "ringcomm-guardian")
_START_S = 10.0
_END_S = 5.0
_FOREVER_S = 1e9  # means "never" to the program


class Ward(NamedTuple):
    pid: int
    page_fd: int  # descriptor of its status page, in the rank's process
    nonce: int  # secret number in the page
    # Descriptors of page and lifeline, for the guardian to inherit if it may not open the page.
    handed: tuple[int, ...] = ()

    @property
    def argument(self) -> str:
        return ":".join(map(str, (self.pid, self.page_fd, self.nonce, *self.handed)))


class Guardian:
    """The guardian of this node, a child process of the rank that started it.

    Args:
        wards: the ranks of this node.
        grace_s: seconds that ranks may live after a failure.
        is_fault_tolerant: the other ranks continue after a failure.
        is_hydra: the launcher is MPICH's, which reports success if a rank ended with C's _exit(0).
            The guardian keeps the job alive until the launcher has seen another exit code.

    In a job of `ringcomm run`, the guardian writes its report to the folder of the run.
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
                    _PROGRAM,
                    str(int(min(grace_s, _FOREVER_S) * 1000)),
                    str(int(is_fault_tolerant)),
                    str(int(is_hydra)),
                    run_file(f"guardian-{launched_rank()}"),
                    *(w.argument for w in wards),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
                close_fds=True,
                pass_fds=handed,
                cwd="/",
                env=run_folder_id(),
            )
        if not self._is_watching():
            self._process.kill()
            self._process.wait()
            raise OSError(f"{_PROGRAM} did not start to watch (exit {self._process.returncode})")

    def wait(self) -> None:
        """Wait at most 5 s for the guardian, which ends soon after all its ranks have left."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.disown()

    def disown(self) -> None:
        """Leave the guardian running; it belongs to the job, not to this process."""
        self._process.returncode = 0  # Popen neither warns nor waits

    def _is_watching(self) -> bool:
        pipe = self._process.stdout
        assert pipe is not None
        with pipe:
            ready, _, _ = select.select([pipe], [], [], _START_S)
            return bool(ready) and pipe.read(1) == b"w"
