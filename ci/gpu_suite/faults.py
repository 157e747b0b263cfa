"""Kills or stops a rank while the streams of the other ranks wait for its part of an allreduce.

usage: python -m gpu_suite.faults                        all faults, each in a job of 4 ranks
       mpirun -np 4 python -m gpu_suite.faults FAULT     one fault; reports go to this folder

The stream of rank 1 is busy when rank 1 calls allreduce. So the other ranks are in
torch.cuda.synchronize() when the fault happens. They must return from there, get an error that
names rank 1, and end, all within a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gpu_suite.outcome_lines import detail, figure
from gpu_suite.stage_runner import end_session
from harness import Job, finish_job, start_job

SIZE, VICTIM = 4, 1
TIMEOUT_S = 5
LIMIT_S = 60  # of a job
END_S = 25  # from the fault to the end of the job
BUSY_S = 30  # longer than all deadlines


@dataclass(frozen=True)
class Fault:
    """A fault of rank 1, and its expected outcome."""

    signal: signal.Signals  # that rank 1 sends itself
    is_late: bool = True  # rank 1 has called allreduce, behind other work; False: it has not
    options: tuple[str, ...] = ()  # of mpirun; with ULFM it lets the survivors live
    error: str = ""  # of the survivors; "": mpirun may end them before they report
    within_s: tuple[float, float] = (0, 5)  # when they get it, in seconds after the fault


ULFM = ("--with-ft", "ulfm")
DEADLINE = (TIMEOUT_S - 1, TIMEOUT_S + 8)
FAULTS = {
    "kill": Fault(signal.SIGKILL, options=ULFM, error="PeerFailedError"),
    "kill under plain mpirun": Fault(signal.SIGKILL),
    "stop": Fault(signal.SIGSTOP, error="CommTimeoutError", within_s=DEADLINE),
    "stop before the call": Fault(
        signal.SIGSTOP, is_late=False, error="CommTimeoutError", within_s=DEADLINE
    ),
}


# --- the jobs -----------------------------------------------------------------------------------
def main() -> int:
    with ThreadPoolExecutor(len(FAULTS)) as pool:
        verdicts = list(pool.map(run, FAULTS))
    problems = []
    for name, (text, wrong) in zip(FAULTS, verdicts, strict=True):
        detail(f"{name:<24} {text}{'; '.join(['', *wrong])}")
        problems += [f"{name}: {what}" for what in wrong]
    figure(f"{sum(not wrong for _, wrong in verdicts)} of {len(FAULTS)} end as promised")
    for problem in problems:
        print(f"AssertionError: {problem}", flush=True)
    return 1 if problems else 0


def run(name: str) -> tuple[str, list[str]]:
    """Return the outcome of a fault, and the problems with it."""
    fault = FAULTS[name]
    environment = {"RINGCOMM_TIMEOUT_S": str(TIMEOUT_S), "RINGCOMM_GPU_TRANSPORT": "ipc"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = start_job(
            SIZE, "-P", "-m", "gpu_suite.faults", name, cwd=folder, env=environment,
            options=(*fault.options, "--bind-to", "none"),
        )  # fmt: skip
        try:
            job = finish_job(process, LIMIT_S)
        except AssertionError as error:
            end_session(process.pid, 0)
            return "the job hangs", [str(error)]
        ended_at = time.time()
        print(f"--- {name}: exit {job.code}\n{job.output}", flush=True)
        return judge(fault, job, ended_at, read_reports(Path(folder)))


def read_reports(folder: Path) -> dict[int, dict]:
    """Return the reports, by rank."""
    return {int(p.stem): json.loads(p.read_text()) for p in folder.glob("[0-9].json")}


def judge(
    fault: Fault, job: Job, ended_at: float, reports: dict[int, dict]
) -> tuple[str, list[str]]:
    if VICTIM not in reports:
        return "no fault", ["the job ended before it happened"]
    struck_at = reports.pop(VICTIM)["at"]
    wrong = [] if job.code else ["the job ended with 0"]
    if ended_at - struck_at > END_S:
        wrong.append(f"the job ended after {ended_at - struck_at:.0f} s")
    if f"rank {VICTIM}" not in job.output:
        wrong.append(f"the report does not name rank {VICTIM}")
    if fault.error and len(reports) < SIZE - 1:
        wrong.append(f"only ranks {sorted(reports)} got an error")
    for rank, report in sorted(reports.items() if fault.error else ()):
        after = report["at"] - struck_at
        if report["error"] != fault.error or not fault.within_s[0] <= after <= fault.within_s[1]:
            wrong.append(f"rank {rank} got {report['error']} after {after:.1f} s")
        if fault.is_late and not report["from"] < struck_at:
            wrong.append(f"rank {rank} was not in torch.cuda.synchronize() when it happened")
    heard = [report["at"] - struck_at for report in reports.values()]
    text = f"{fault.error} after {max(heard):.1f} s, " if fault.error and heard else ""
    return f"{text}end after {ended_at - struck_at:.1f} s", wrong


# --- a rank -------------------------------------------------------------------------------------
def be_a_rank(fault: Fault) -> None:
    import torch
    from gpu_suite.gpu_helpers import sleep, start

    import ringcomm as rc

    start()
    x = rc.zeros(1 << 24, "float32", device="cuda")
    for _ in range(3):
        rc.allreduce_(x)
    torch.cuda.synchronize()
    rc.barrier()
    if rc.rank() == VICTIM:
        sleep(BUSY_S)
        if fault.is_late:
            rc.allreduce_(x)
        time.sleep(1)  # the other ranks reach torch.cuda.synchronize()
        report(VICTIM, at=time.time())
        os.kill(os.getpid(), fault.signal)
    began = 0.0
    try:
        rc.allreduce_(x)
        began = time.time()
        torch.cuda.synchronize()
        rc.allreduce_(x)
    except (rc.PeerFailedError, rc.CommTimeoutError) as error:
        report(rc.rank(), at=time.time(), error=type(error).__name__, **{"from": began})
        wait_for_others()
        raise


def report(rank: int, **facts: object) -> None:
    new = Path(f"{rank}.new")
    new.write_text(json.dumps(facts))
    new.rename(f"{rank}.json")


def wait_for_others() -> None:
    """Wait for all reports: mpirun may end the other ranks when the first one ends."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len(list(Path.cwd().glob("[0-9].json"))) < SIZE:
        time.sleep(0.01)  # files of other processes


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_a_rank(FAULTS[sys.argv[1]])
    else:
        sys.exit(main())
