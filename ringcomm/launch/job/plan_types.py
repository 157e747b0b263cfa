"""The inputs of plan(), which are a user's request and the surroundings, and its result. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from ringcomm.launch.check_install.facts import Facts
from ringcomm.launch.job.hosts import Host
from ringcomm.launch.job.limits import Limits

LAUNCHERS: Final = ("mpirun", "srun")


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The command line of `ringcomm run`.

    Attributes:
        program: the command of a rank.
        np: number of workers; None: as many as the hosts have places for.
        hosts: from -H or a host file; (): those of the scheduler, or this host.
        servers, evaluators: parameter servers and evaluators, in addition to the workers.
        spares: ranks that wait to take the place of a dead one, in addition to all others.
        worker_spares: those that wait to take the place of a worker beside servers, likewise.
        reserves: ranks that sleep until there are too few, in addition to all others.
        elastic: the lowest and highest number of workers; None: the number stays.
        timeline: prefix of the timeline; "": in the run folder; None: no timeline.
        launcher: what starts the ranks.
        oversubscribes: hosts may get more ranks than they have places.
        options: further options of the launcher.
        variables: environment variables for the ranks; None: the value that this process has.
        interfaces: network interfaces for traffic between hosts; (): all.
        ssh: options of ssh, by which ranks on other hosts are started.
    """

    program: tuple[str, ...]
    np: int | None = None
    hosts: tuple[Host, ...] = ()
    servers: int = 0
    evaluators: int = 0
    spares: int = 0
    worker_spares: int = 0
    reserves: int = 0
    elastic: tuple[int, int] | None = None
    timeline: str | None = None
    launcher: Literal["mpirun", "srun"] = "mpirun"
    oversubscribes: bool = False
    options: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    ssh: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Facts about this machine that `ringcomm run` uses.

    Attributes:
        facts: about the installation.
        environ: the environment of this process.
        own_names: names of this host.
        rank_of: the variable by which this process is a rank of a job already; "": it is none.
        node_file: text of PBS's $PBS_NODEFILE; None: not under PBS.
        srun_types: what `srun --mpi=list` shows; None: there is no srun.
        free_port: a TCP port that nobody uses here.
        folder: the run folder, as an absolute path.
        starter: path of the script that starts the program of a rank.
        limits: files and processes that the job may have here.
    """

    facts: Facts
    environ: Mapping[str, str]
    own_names: frozenset[str]
    rank_of: str = ""
    node_file: str | None = None
    srun_types: tuple[str, ...] | None = None
    free_port: int
    folder: str
    starter: str
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class RunPlan:
    """The command and environment that start a job.

    Attributes:
        argv: the command that starts all ranks.
        variables: what it adds to the environment.
        roles: number of ranks by role.
        hosts: hosts and their places; (): this host.
        notes: decisions that a user may want to know.
        files: files that the launcher reads from the run folder, by name.
    """

    argv: tuple[str, ...]
    variables: Mapping[str, str]
    roles: Mapping[str, int]
    hosts: tuple[Host, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(self.roles.values())
