"""Finds what `ringcomm run` needs to know of this machine."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path

from ringcomm.errors import ConfigError
from ringcomm.launch.check_install.gather_facts import gather
from ringcomm.launch.job.plan_types import Surroundings
from ringcomm.launch.run_child_with_deadline import run_child
from ringcomm.launched import become_rank_program
from ringcomm.launched.launcher import launching_variable
from ringcomm.system_text import host_name, read_text

_ANSWER_S = 30.0


def gather_surroundings(
    environ: Mapping[str, str], folder: Path, *, asks_srun: bool
) -> Surroundings:
    """Return what plan() is to know. Takes about 0.3 s.

    Raises ConfigError if $PBS_NODEFILE cannot be read.
    """
    return Surroundings(
        facts=gather(environ, with_gpu=False),
        environ=environ,
        own_names=_own_names(),
        rank_of=launching_variable(environ) or "",
        node_file=_node_file(environ),
        srun_types=_srun_types(environ) if asks_srun else None,
        free_port=_free_port(),
        folder=str(folder),
        starter=str(Path(become_rank_program.__file__).resolve()),
    )


def _own_names() -> frozenset[str]:
    name = host_name()
    return frozenset({name, name.partition(".")[0], "localhost", "127.0.0.1", "::1"})


def _node_file(environ: Mapping[str, str]) -> str | None:
    path = environ.get("PBS_NODEFILE")
    if not path:
        return None
    try:
        return read_text(path)
    except OSError as error:
        raise ConfigError(
            f"PBS_NODEFILE is {path}, which cannot be read ({error.strerror}). Name the hosts by -H"
        ) from error


def _srun_types(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    path = shutil.which("srun", path=environ.get("PATH", os.defpath))
    if path is None:
        return None
    outcome = run_child([path, "--mpi=list"], environ, deadline_s=_ANSWER_S)
    return tuple(outcome.output.split())


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
    return port
