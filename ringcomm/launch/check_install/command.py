"""`ringcomm check`: examines the installation; the line of each problem ends with a fix."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence

from ringcomm import config
from ringcomm.launch.check_install.gather_facts import gather
from ringcomm.launch.check_install.judge_facts import SUBJECTS, Finding, has_problem, judge
from ringcomm.launch.check_install.trial_job import run_trial
from ringcomm.progress_bar import working

_WIDTH = max(map(len, SUBJECTS))


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
    parser = argparse.ArgumentParser(
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
