"""plan(): decides how many ranks run where, with which variables, and by which command. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ringcomm.errors import ConfigError
from ringcomm.launch.check_install.judge_facts import judge, problem_of
from ringcomm.launch.job.hosts import Host, parse_host_file, places_of, slurm_hosts
from ringcomm.launch.job.launchers import Order, start_by_mpirun, start_by_srun
from ringcomm.launch.job.plan_types import RunPlan, RunRequest, Surroundings

_THREADS: Final = "OMP_NUM_THREADS"
_LEAST_LOSSES: Final = 8  # as by default: small jobs may be resized, too
_BELOW_MIN: Final = 4  # so many losses more end with code 75 and a checkpoint; others with an error
_SLURM: Final = "the hosts of this Slurm job"


def plan(request: RunRequest, here: Surroundings) -> RunPlan:
    """Return how to start the job.

    Raises ConfigError if that is impossible; the text says what to do.
    """
    _refuse_what_is_missing(request, here)
    where = _where(request, here)
    is_all_here = not (where.hosts or where.is_slurm)
    if is_all_here and here.facts.launcher_family == "openmpi" and request.launcher == "mpirun":
        here.limits.require(where.size)
    threads, thread_notes = _threads(request, here, where)
    variables = _variables(request, here, where, threads) | _given(request, here)
    order = Order(
        size=where.size,
        hosts=() if where.is_slurm else where.hosts,
        is_over_hosts=bool(where.hosts),
        oversubscribes=where.oversubscribes,
        variables={*variables, *request.variables},
    )
    start_by = {"mpirun": start_by_mpirun, "srun": start_by_srun}[request.launcher]
    start = start_by(request, here, order)
    python = here.facts.python[1]
    program = map(_escaped, request.program)
    return RunPlan(
        argv=(*start.argv, python, "-I", "-S", here.starter, here.folder, *program),
        variables=start.variables | variables,
        roles=where.roles,
        hosts=where.hosts,
        notes=tuple(thread_notes or where.notes),
        files=start.files,
    )


def _escaped(argument: str) -> str:
    r"""Return r"\:" for ":", where launchers part commands; rank_program takes it back."""
    return f"\\{argument}" if argument.lstrip("\\") == ":" else argument


def _refuse_what_is_missing(request: RunRequest, here: Surroundings) -> None:
    if here.rank_of:
        raise ConfigError(
            f"this process is a rank of a job already ({here.rank_of} is set), so there would be a "
            "job for each rank. Call `ringcomm run` once, without mpirun or srun before it"
        )
    if (request.spares or request.reserves) and not request.elastic:
        flag = "--spares" if request.spares else "--reserves"
        raise ConfigError(
            f"{flag}: only an elastic job has places for other ranks. Add --elastic MIN:MAX"
        )
    if request.worker_spares and not (request.servers and request.elastic):
        raise ConfigError(
            "--worker-spares: it is for an elastic job with parameter servers. Add --servers N and "
            "--elastic MIN:MAX; without servers, spares of workers are --spares"
        )
    findings = judge(here.facts)
    if request.launcher == "srun":
        findings = [each for each in findings if each.subject != "mpirun"]
    if problem := problem_of(findings):
        fix = problem.fix or "Run `ringcomm check`"
        raise ConfigError(f"{problem.subject}: {problem.found.rstrip('.')} -> {fix}")


# --- where the ranks run ------------------------------------------------------------------------
@dataclass(frozen=True)
class _Where:
    """Number of ranks per role, and their hosts."""

    roles: dict[str, int]
    hosts: tuple[Host, ...]  # (): this host alone
    is_slurm: bool  # the launcher gets the hosts from Slurm by itself
    oversubscribes: bool
    notes: tuple[str, ...]

    @property
    def size(self) -> int:
        return sum(self.roles.values())


def _where(request: RunRequest, here: Surroundings) -> _Where:
    hosts, origin = _hosts(request, here)
    if request.np is None and not hosts:
        raise ConfigError("say how many ranks: -np N")
    roles = _roles(request, hosts, origin)
    size, places = sum(roles.values()), places_of(hosts)
    if hosts and size > places and not request.oversubscribes:
        raise ConfigError(
            f"{origin} have {places} places ({', '.join(map(str, hosts))}), and the job has {size} "
            f"ranks ({_listed(roles)}). Add places, or pass --oversubscribe"
        )
    is_slurm = origin == _SLURM
    is_here = not is_slurm and all(host.name in here.own_names for host in hosts)
    cores = here.facts.cores
    shares_cores = is_here and size > cores
    note = f"{size} ranks share {_counted(cores, 'core')}"
    return _Where(
        roles,
        () if is_here else hosts,
        is_slurm,
        request.oversubscribes or shares_cores,
        (note,) if shares_cores else (),
    )


def _hosts(request: RunRequest, here: Surroundings) -> tuple[tuple[Host, ...], str]:
    """Return the hosts, and where they come from; ((), "") for this host."""
    if request.hosts:
        return request.hosts, "the hosts of -H or --hostfile"
    if hosts := slurm_hosts(here.environ):
        return hosts, _SLURM
    if here.node_file is not None:
        return parse_host_file(here.node_file, "$PBS_NODEFILE"), "the hosts of $PBS_NODEFILE"
    return (), ""


def _roles(request: RunRequest, hosts: tuple[Host, ...], origin: str) -> dict[str, int]:
    others = {
        "server": request.servers,
        "evaluator": request.evaluators,
        "spare": request.spares + request.worker_spares,
        "reserve": request.reserves,
    }
    np = places_of(hosts) - sum(others.values()) if request.np is None else request.np
    if request.elastic:
        low, high = request.elastic
        if np < low:
            raise ConfigError(f"--elastic {low}:{high}: there are {np} workers, fewer than {low}")
        np = min(np, high)
        others["reserve"] += high - np
    if np < 1:
        raise ConfigError(
            f"{origin} have {places_of(hosts)} places, and {_listed(others)} leave none for workers"
        )
    return {role: count for role, count in {"worker": np, **others}.items() if count}


def _listed(roles: dict[str, int]) -> str:
    return ", ".join(_counted(n, role) for role, n in roles.items() if n)


# --- variables ----------------------------------------------------------------------------------
def _threads(request: RunRequest, here: Surroundings, where: _Where) -> tuple[int, list[str]]:
    """Return the number of threads of a rank, and a note if it is decided here."""
    text = request.variables.get(_THREADS) or here.environ.get(_THREADS)
    if text is not None:
        return (int(text) if text.isdigit() else 1), []
    cpus = here.environ.get("SLURM_CPUS_PER_TASK", "")
    if where.is_slurm and cpus.isdigit():
        return int(cpus), [f"{_THREADS}={cpus}, Slurm's --cpus-per-task"]
    ranks = min(where.size, max((host.places for host in where.hosts), default=where.size))
    threads = max(1, here.facts.cores // ranks)
    chosen, cores = f"{_THREADS}={threads}", here.facts.cores
    if where.notes:
        return threads, [f"{', '.join(where.notes)}: {chosen}"]
    return threads, [f"{chosen}: {_counted(cores, 'core')} for {_counted(ranks, 'rank')}"]


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"


def _variables(
    request: RunRequest, here: Surroundings, where: _Where, threads: int
) -> dict[str, str]:
    wanted = {
        "MASTER_ADDR": where.hosts[0].name if len(where.hosts) > 1 else "127.0.0.1",
        "MASTER_PORT": str(here.free_port),
        "PYTHONUNBUFFERED": "1",  # so that the log of a killed rank is complete
        _THREADS: str(threads),
        "UCX_DEBUG_SIGNO": "0",  # UCX, a part of both MPIs, would take SIGHUP for itself
    }
    made = {name: value for name, value in wanted.items() if name not in here.environ}
    if request.servers:
        made["RINGCOMM_PS_SERVERS"] = str(request.servers)
    if request.evaluators:
        made["RINGCOMM_PS_EVALUATORS"] = str(request.evaluators)
    if request.spares:
        made["RINGCOMM_PS_SPARES" if request.servers else "RINGCOMM_SPARES"] = str(request.spares)
    if request.worker_spares:
        made["RINGCOMM_PS_WORKER_SPARES"] = str(request.worker_spares)
    if request.elastic:
        low, _ = request.elastic
        made["RINGCOMM_ELASTIC"] = "1"
        made["RINGCOMM_ELASTIC_MIN"] = str(low)
        losses = max(where.size - low + _BELOW_MIN, _LEAST_LOSSES)
        if "RINGCOMM_ELASTIC_LOSSES" not in here.environ:
            made["RINGCOMM_ELASTIC_LOSSES"] = str(losses)
        if reserves := where.roles.get("reserve", 0):
            made["RINGCOMM_RESERVES"] = str(reserves)
    if request.timeline is not None:
        made["RINGCOMM_TIMELINE"] = request.timeline or f"{here.folder}/timeline"
    return made


def _given(request: RunRequest, here: Surroundings) -> dict[str, str]:
    for name, value in request.variables.items():
        if value is None and name not in here.environ:
            raise ConfigError(f"--env {name}: it is not set. Set it, or pass --env {name}=VALUE")
    return {name: value for name, value in request.variables.items() if value is not None}
