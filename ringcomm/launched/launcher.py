"""The launcher of this process: which it is, and which rank it made of this process."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import sys
from collections.abc import Container, Mapping, Sequence

from ringcomm.errors import ConfigError
from ringcomm.launched.ancestors import mpirun_and_above
from ringcomm.launched.child_marks import RUN_FOLDER
from ringcomm.system_text import read_text


def is_on(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "on")


_MPI_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_size(environ: Mapping[str, str] = os.environ) -> tuple[str, int] | None:
    """Return the variable in which a launcher announces more than one rank, and their number.

    SLURM_NTASKS does not count: sbatch sets it for a plain python, too.
    """
    for variable in _WORLD_SIZES:
        text = environ.get(variable, "")
        if text.isdigit() and int(text) > 1:
            return variable, int(text)
    return None


def launching_variable(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a variable that shows that an MPI launcher started this process, or None.

    A shell that Slurm has started as the only task of a step, as `salloc` may do, is no rank.
    """
    if environ.get("SLURM_STEP_NUM_TASKS") == "1" and "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    ranks = (name for name in (*_MPI_RANKS, "PMI_ID") if name in environ)
    sized = launched_size(environ)
    return next(ranks, sized[0] if sized else None)


def is_launched_by_mpi(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if an MPI launcher started this process, even as the only rank."""
    is_rank = any(name in environ for name in (*_MPI_RANKS, "PMI_ID"))
    return is_rank or launched_size(environ) is not None


_FOREIGN = {
    "TORCHELASTIC_RUN_ID": "torchrun",
    "GROUP_RANK": "torchrun",
    "RAY_JOB_ID": "Ray",
    "RAY_ADDRESS": "Ray",
}


def foreign_launcher(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of a launcher that is not MPI's, "" if the environment shows none."""
    return next((name for variable, name in _FOREIGN.items() if variable in environ), "")


def torch_ranks(environ: Mapping[str, str] = os.environ) -> dict[str, int]:
    """Return "rank" and "world_size" from torch.distributed's variables, where they are set.

    Raises ConfigError if a variable is not a number.
    """
    found = {}
    for variable in ("RANK", "WORLD_SIZE"):
        text = environ.get(variable, "")
        if text and not text.isdigit():
            raise ConfigError(f"{variable} is {text!r}; it must be a number >= 0, or not be set.")
        if text:
            found[variable.lower()] = int(text)
    return found


def require_mpi_launcher(
    size: int, who: str, *, or_else: str = "", environ: Mapping[str, str] = os.environ
) -> None:
    """Raise ConfigError if several ranks are wanted, but no MPI launcher started this process.

    Without one, every process is an MPI job of its own, and a sum has the values of one rank. To be
    called before MPI starts.

    Args:
        size: number of ranks that are wanted.
        who: the variable or argument that demands them, such as "WORLD_SIZE".
        or_else: further advice for the text.
        environ: environment to examine; by default, that of this process.
    """
    if size <= 1 or is_launched_by_mpi(environ):
        return
    launcher = foreign_launcher(environ)
    by = f"{launcher} started this process" if launcher else "no MPI launcher started this process"
    raise ConfigError(
        f"{who} wants {size} ranks, but {by}: for MPI it is rank 0 of 1. Run instead: "
        f"{command_for(size)} (or mpirun -np N python), and do not set RANK and "
        f"WORLD_SIZE{or_else}"
    )


def command_for(size: int | str, *options: str, argv: Sequence[str] | None = None) -> str:
    words = sys.argv if argv is None else argv
    is_file = bool(words) and words[0] not in ("", "-c", "-m")
    program = [*words] if is_file else ["train.py"]
    if argv is None and (module := _main_module()):
        program = ["-m", module, *words[1:]]
    return shlex.join(["ringcomm", "run", "-np", str(size), *options, *program])


def _main_module() -> str:
    """Return what stands after `python -m`, "" if this process was not started so."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or spec.name == "__main__":  # a script; a folder or an archive
        return ""
    return str(spec.name).removesuffix(".__main__")


def refuse_foreign_ranks(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if torchrun, or a similar launcher, started this process among others."""
    text = environ.get("WORLD_SIZE", "")
    if text.isdigit():  # other texts are not torch's
        alone = "; or unset WORLD_SIZE, if this process is to be alone"
        require_mpi_launcher(int(text), "WORLD_SIZE", or_else=alone, environ=environ)


def missing_of_torch(
    given: Container[str] = (), environ: Mapping[str, str] = os.environ
) -> list[str]:
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return [name for name in needed if not environ.get(name) and name.lower() not in given]


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank that a launcher gave this process, or 0; works before init()."""
    found = (environ.get(variable, "") for variable in (*_MPI_RANKS, "SLURM_PROCID"))
    return next((int(text) for text in found if text.isdigit()), 0)


def launched_local_size(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks of this host, or of the job if the launcher says only that."""
    sized = launched_size(environ)
    found = (environ.get(name, "") for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"))
    return next((int(text) for text in found if text.isdigit()), 1 if sized is None else sized[1])


def is_fault_tolerant(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True under `mpirun --with-ft ulfm`."""
    return is_on(environ.get("OMPI_MCA_mpi_ft_enable", ""))


def is_by_srun(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if Slurm's srun started this rank itself, and not mpirun in a Slurm job."""
    return "SLURM_STEP_NUM_TASKS" in environ and "PRTE_LAUNCHED" not in environ


def is_hydra(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if MPICH's launcher, or another that speaks its PMI, started this rank."""
    is_pmi = any(name in environ for name in ("PMI_FD", "PMI_PORT"))
    return is_pmi and "PMIX_NAMESPACE" not in environ


def job_on_this_host(environ: Mapping[str, str] = os.environ) -> str:
    """Return a name that the ranks of one job on one host share, and that no other job has."""
    return environ.get("PMIX_NAMESPACE", "") or f"child of {os.getppid()}"


def mpirun_command() -> tuple[str, ...]:
    """Return the command line of the mpirun that started this process; () if it is elsewhere."""
    for pid in itertools.islice(mpirun_and_above(), 1):
        with contextlib.suppress(OSError):
            return tuple(read_text(f"/proc/{pid}/cmdline").split("\0")[:-1])
    return ()


def launcher_terminal(descriptor: int, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the terminal on which the launcher prints what this process writes, or None.

    Args:
        descriptor: 1: of stdout; 2: of stderr.
        environ: environment to examine; by default, that of this process.
    """
    if not is_launched_by_mpi(environ):
        return os.ttyname(descriptor) if os.isatty(descriptor) else None
    # `ringcomm run` reads what its mpirun prints, and prints that itself.
    depth = 2 if RUN_FOLDER in environ else 1
    for pid in itertools.islice(mpirun_and_above(), depth):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if path.startswith(("/dev/pts/", "/dev/tty")):
                return path
    return None
