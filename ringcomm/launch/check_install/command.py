"""`ringcomm check`: examines the installation; the line of each problem ends with a fix."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from ringcomm import config
from ringcomm.launch.check_install.facts import Facts
from ringcomm.launch.check_install.gather_facts import gather
from ringcomm.launch.check_install.judge_facts import (
    SUBJECTS,
    Finding,
    has_problem,
    judge,
    problem_of,
)
from ringcomm.launch.child import last_lines
from ringcomm.launch.command_line import CommandParser
from ringcomm.launch.job.local_job import LocalEnding, run_on_this_host
from ringcomm.launch.job.plan_types import RunRequest
from ringcomm.progress_bar import working

_WIDTH: Final = max(map(len, SUBJECTS))


def main(argv: Sequence[str]) -> int:
    """Print what is installed and what to fix; return 1 if there is a problem, else 0.

    Does not start MPI in this process.
    """
    args = _parser().parse_args(argv)
    findings = []
    for finding in _examine(with_trial=args.run):
        findings.append(finding)
        if not args.json:
            print(_line(finding), flush=True)
    if args.json:
        print(_json(findings))
    return 1 if has_problem(findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="ringcomm check",
        description="Show what is installed, what does not fit, and the command that fixes it. "
        "The exit code is 1 if there is a problem, else 0.",
    )
    parser.add_argument("--run", action="store_true", help="also do an allreduce of two ranks")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def _examine(*, with_trial: bool) -> Iterator[Finding]:
    environ = config.environment()
    facts = gather(environ)
    findings = judge(facts)
    yield from findings
    if with_trial:
        with working("two ranks do an allreduce"):
            found = run_trial(facts, findings, environ)
        yield found


def _line(finding: Finding) -> str:
    first, *details = finding.found.split("\n")
    line = f"{finding.status:<8} {finding.subject:<{_WIDTH}}  {first}"
    if finding.fix is not None:
        line += f"  ->  {finding.fix}"
    return "\n".join([line, *(f"    {detail}" for detail in details)])


def _json(findings: list[Finding]) -> str:
    checks = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"ok": not has_problem(findings), "checks": checks}, indent=2)


# --- two ranks ------------------------------------------------------------------------------------
_DEADLINE_S = 60.0
_CORRECT = "ringcomm-check: correct"
_PORTS = "ringcomm-check: ports"
_READS = "ringcomm-check: reads"
_TAIL = 12  # lines of a failure's output
# Integers are exact in float32. An odd count gives chunks of different sizes.
_JOB: Final = f"""
import numpy as np
import ringcomm as rc
from ringcomm.engine.executors.mail import how_long_messages_come
from ringcomm.launch.check_install.gather_facts import listening_ports
rc.init()
x = np.arange(300007, dtype=np.float32)
total = rc.allreduce(x * (rc.rank() + 1), name="check")
assert rc.size() == 2, f"the job has {{rc.size()}} ranks"
assert np.array_equal(total, x * 3), "the sum is wrong"
if rc.rank() == 0:
    rc.send(x, 1)
else:
    received = np.zeros_like(x)
    rc.recv(received, 0)
    assert np.array_equal(received, x), "the message is wrong"
    print({_READS!r}, how_long_messages_come(), flush=True)
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
        text = f"2 ranks, allreduce correct, {seconds:.1f} s{_extras(facts)}"
        return Finding("run", "ok", text + _reads_text(ending.output) + _ports_text(ending.output))
    how = f"2 ranks did not end in {_DEADLINE_S:.0f} s"
    if verdict is not None:
        how = f"2 ranks failed, exit {verdict.code} after {seconds:.1f} s"
    found = [f"{how}{_extras(facts)}; MPI alone should print 2 twice"]
    found += last_lines(ending.output, _TAIL)
    return Finding("run", "problem", "\n".join(found), _alone(facts))


def _reads_text(output: str) -> str:
    """Return how the long message came; "" if the ranks did not tell."""
    told = [line.removeprefix(_READS) for line in output.splitlines() if line.startswith(_READS)]
    return f"; a long message was {told[-1].strip()}" if told else ""


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
