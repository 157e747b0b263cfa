"""Runs an allreduce of two ranks with this Python and this mpirun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ringcomm.launch.check_install.facts import ROOT_VARIABLES, Facts
from ringcomm.launch.check_install.judge_facts import Finding, problem_of
from ringcomm.launch.run_child_with_deadline import ChildOutcome, outside_of_a_job, run_child

_DEADLINE_S = 60.0
_CORRECT = "ringcomm-check: correct"
_PORTS = "ringcomm-check: ports"
_TAIL = 12  # lines of a failure's output
# Integers are exact in float32. An odd count gives chunks of different sizes.
_JOB: Final = f"""
import numpy as np
import ringcomm as rc
from ringcomm.launch.check_install.gather_facts import listening_ports
rc.init()
x = np.arange(300007, dtype=np.float32)
total = rc.allreduce(x * (rc.rank() + 1), name="check")
assert rc.size() == 2, f"the job has {{rc.size()}} ranks"
assert np.array_equal(total, x * 3), "the sum is wrong"
ports = sorted(set(sum(rc.allgather_object(listening_ports()), [])))
if rc.rank() == 0:
    print({_CORRECT!r}, flush=True)
    print({_PORTS!r}, *ports, flush=True)
rc.shutdown()
"""
_MPI_ALONE: Final = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"


@dataclass(frozen=True)
class TrialPlan:
    mpirun: tuple[str, ...]  # the arguments before the program: mpirun -np 2
    python: str
    variables: Mapping[str, str]  # environment variables of the command


def run_trial(facts: Facts, findings: list[Finding], environ: Mapping[str, str]) -> Finding:
    """Run an allreduce of two ranks, unless a problem prevents it; return the finding."""
    plan = plan_trial(facts)
    first = problem_of(findings)
    if first is not None or plan is None:
        subject, fix = (first.subject, first.fix) if first is not None else ("mpirun", None)
        return Finding("run", "problem", f"not tried: the problem with {subject} comes first", fix)
    outcome = run_child(
        [*plan.mpirun, plan.python, "-P", "-c", _JOB],
        {**outside_of_a_job(environ), **plan.variables},
        deadline_s=_DEADLINE_S,
    )
    return judge_trial(plan, outcome)


def plan_trial(facts: Facts, size: int = 2) -> TrialPlan | None:
    """Return how to start `size` ranks here; None if there is no working mpirun. Pure."""
    launcher = facts.launcher
    if launcher is None or launcher.kind is None:
        return None
    is_openmpi = launcher.kind.family == "openmpi"
    options = ["--oversubscribe"] if is_openmpi and facts.cores < size else []
    needs_root = is_openmpi and facts.is_root and not facts.allows_root
    return TrialPlan(
        mpirun=(launcher.path, *options, "-np", str(size)),
        python=facts.python[1],
        variables={
            **launcher.variables,
            **(dict.fromkeys(ROOT_VARIABLES, "1") if needs_root else {}),
        },
    )


def judge_trial(plan: TrialPlan, outcome: ChildOutcome) -> Finding:
    if outcome.code == 0 and _CORRECT in outcome.output:
        found = f"2 ranks, allreduce correct, {outcome.seconds:.1f} s{_extras(plan)}"
        found += _ports_text(outcome.output)
        return Finding("run", "ok", found)
    if outcome.code is None:
        how = f"2 ranks did not end in {_DEADLINE_S:.0f} s"
    else:
        how = f"2 ranks failed, exit {outcome.code} after {outcome.seconds:.1f} s"
    found = f"{how}{_extras(plan)}; MPI alone should print 2 twice"
    return Finding("run", "problem", "\n".join([found, *outcome.last_lines(_TAIL)]), _alone(plan))


def _ports_text(output: str) -> str:
    """Return on which ports the ranks listen; "" if they did not tell."""
    told = [line.removeprefix(_PORTS) for line in output.splitlines() if line.startswith(_PORTS)]
    if not told:
        return ""
    if not (ports := told[-1].split()):
        return "; the ranks of one host listen on no port"
    return (
        f"; the ranks listen on TCP port {', '.join(ports)}: who reaches it can stop the job, see "
        "SECURITY.md"
    )


def _extras(plan: TrialPlan) -> str:
    extras = [f"{name}={value}" for name, value in plan.variables.items()]
    extras += [option for option in plan.mpirun if option == "--oversubscribe"]
    return f" (with {' '.join(extras)})" if extras else ""


def _alone(plan: TrialPlan) -> str:
    variables = [f"{name}={value}" for name, value in plan.variables.items()]
    return shlex.join([*variables, *plan.mpirun, plan.python, "-c", _MPI_ALONE])
