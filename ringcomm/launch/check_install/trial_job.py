"""Runs an allreduce of two ranks with this Python and this mpirun."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ringcomm.launch.check_install.facts import Facts
from ringcomm.launch.check_install.judge_facts import Finding, problem_of
from ringcomm.launch.job.local_job import LocalEnding, run_on_this_host
from ringcomm.launch.job.plan_types import RunRequest
from ringcomm.launch.run_child_with_deadline import last_lines

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


def run_trial(facts: Facts, findings: list[Finding], environ: Mapping[str, str]) -> Finding:
    """Run an allreduce of two ranks, unless a problem prevents it; return the finding."""
    if first := problem_of(findings):
        found = f"not tried: the problem with {first.subject} comes first"
        return Finding("run", "problem", found, first.fix)
    with tempfile.TemporaryDirectory(prefix="ringcomm-check-") as folder:
        request = RunRequest(program=(facts.python[1], "-P", "-c", _JOB), np=2)
        ending = run_on_this_host(request, Path(folder), environ, deadline_s=_DEADLINE_S)
    return judge_trial(facts, ending)


def judge_trial(facts: Facts, ending: LocalEnding) -> Finding:
    seconds, verdict = ending.seconds, ending.verdict
    if verdict is not None and verdict.code == 0 and _CORRECT in ending.output:
        found = f"2 ranks, allreduce correct, {seconds:.1f} s{_extras(facts)}"
        return Finding("run", "ok", found + _ports_text(ending.output))
    how = f"2 ranks did not end in {_DEADLINE_S:.0f} s"
    if verdict is not None:
        how = f"2 ranks failed, exit {verdict.code} after {seconds:.1f} s"
    found = f"{how}{_extras(facts)}; MPI alone should print 2 twice"
    return Finding(
        "run", "problem", "\n".join([found, *last_lines(ending.output, _TAIL)]), _alone(facts)
    )


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


def _extras(facts: Facts) -> str:
    extras = [*_variables(facts), *_options(facts)]
    return f" (with {' '.join(extras)})" if extras else ""


def _alone(facts: Facts) -> str:
    """Return the command that tries MPI without ringcomm: mpirun gets no more than it needs."""
    assert facts.launcher is not None  # else there was a problem
    mpirun = [facts.launcher.path, *_options(facts), "-np", "2"]
    return shlex.join([*_variables(facts), *mpirun, facts.python[1], "-c", _MPI_ALONE])


def _variables(facts: Facts) -> list[str]:
    return [f"{name}={value}" for name, value in facts.mpirun_variables.items()]


def _options(facts: Facts) -> list[str]:
    is_short = facts.cores < 2 and facts.launcher_family == "openmpi"
    return ["--oversubscribe"] if is_short else []
