"""A rank dies, or stops, while the streams of the others wait for its part of an allreduce.

usage: python -m gpu_suite.faults                        all of them, each a job of 4 ranks
       mpirun -np 4 python -m gpu_suite.faults DEED      one of them; reports in this folder

The stream of rank 1 is busy when it calls allreduce, so the others are in torch.cuda.synchronize()
when it happens. They must get out of there, hear who it was, and end, all within a deadline.
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

from gpu_suite.stage import end_session
from harness import Job, finish_job, start_job

SIZE, VICTIM = 4, 1
TIMEOUT_S = 5
LIMIT_S = 60  # of a job
END_S = 25  # from the fault to its end
BUSY_S = 30  # longer than anything here is allowed to take


@dataclass(frozen=True)
class Deed:
    """A fault of rank 1, and its expected outcome.

    Attributes:
        signal: that it sends itself.
        is_late: its part is on its stream, behind much else; else it has not called at all.
        options: of mpirun; under ULFM it lets the survivors live.
        error: what they get; "": they may be ended before they can say.
        within_s: the seconds after the fault in which they do.
    """

    signal: signal.Signals
    is_late: bool = True
    options: tuple[str, ...] = ()
    error: str = ""
    within_s: tuple[float, float] = (0, 5)


ULFM = ("--with-ft", "ulfm")
DEADLINE = (TIMEOUT_S - 1, TIMEOUT_S + 8)
DEEDS = {
    "kill": Deed(signal.SIGKILL, options=ULFM, error="PeerFailedError"),
    "kill under plain mpirun": Deed(signal.SIGKILL),
    "stop": Deed(signal.SIGSTOP, error="CommTimeoutError", within_s=DEADLINE),
    "stop before the call": Deed(
        signal.SIGSTOP, is_late=False, error="CommTimeoutError", within_s=DEADLINE
    ),
}


# --- the jobs -----------------------------------------------------------------------------------
def main() -> int:
    from gpu_suite.gpu import detail, figure

    with ThreadPoolExecutor(len(DEEDS)) as pool:
        verdicts = list(pool.map(run, DEEDS))
    problems = []
    for name, (text, wrong) in zip(DEEDS, verdicts, strict=True):
        detail(f"{name:<24} {text}{'; '.join(['', *wrong])}")
        problems += [f"{name}: {what}" for what in wrong]
    figure(f"{sum(not wrong for _, wrong in verdicts)} of {len(DEEDS)} end as promised")
    for problem in problems:
        print(f"AssertionError: {problem}", flush=True)
    return 1 if problems else 0


def run(name: str) -> tuple[str, list[str]]:
    """Return what came of a deed, and what is wrong about it."""
    deed = DEEDS[name]
    environment = {"RINGCOMM_TIMEOUT_S": str(TIMEOUT_S), "RINGCOMM_GPU_TRANSPORT": "ipc"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        process = start_job(
            SIZE, "-P", "-m", "gpu_suite.faults", name, cwd=folder, env=environment,
            options=(*deed.options, "--bind-to", "none"),
        )  # fmt: skip
        try:
            job = finish_job(process, LIMIT_S)
        except AssertionError as error:
            end_session(process.pid, 0)
            return "the job hangs", [str(error)]
        ended_at = time.time()
        print(f"--- {name}: exit {job.code}\n{job.output}", flush=True)
        return judge(deed, job, ended_at, read_reports(Path(folder)))


def read_reports(folder: Path) -> dict[int, dict]:
    """Return what each rank has said."""
    return {int(p.stem): json.loads(p.read_text()) for p in folder.glob("[0-9].json")}


def judge(deed: Deed, job: Job, ended_at: float, reports: dict[int, dict]) -> tuple[str, list[str]]:
    if VICTIM not in reports:
        return "no fault", ["the job ended before it happened"]
    fault = reports.pop(VICTIM)["at"]
    wrong = [] if job.code else ["the job ended with 0"]
    if ended_at - fault > END_S:
        wrong.append(f"the job ended after {ended_at - fault:.0f} s")
    if f"rank {VICTIM}" not in job.output:
        wrong.append(f"the report does not name rank {VICTIM}")
    if deed.error and len(reports) < SIZE - 1:
        wrong.append(f"only ranks {sorted(reports)} got an error")
    for rank, report in sorted(reports.items() if deed.error else ()):
        after = report["at"] - fault
        if report["error"] != deed.error or not deed.within_s[0] <= after <= deed.within_s[1]:
            wrong.append(f"rank {rank} got {report['error']} after {after:.1f} s")
        if deed.is_late and not report["from"] < fault:
            wrong.append(f"rank {rank} was not in torch.cuda.synchronize() when it happened")
    heard = [report["at"] - fault for report in reports.values()]
    text = f"{deed.error} after {max(heard):.1f} s, " if deed.error and heard else ""
    return f"{text}end after {ended_at - fault:.1f} s", wrong


# --- a rank -------------------------------------------------------------------------------------
def be_a_rank(deed: Deed) -> None:
    import torch
    from gpu_suite.gpu import sleep, start

    import ringcomm as rc

    start()
    x = rc.zeros(1 << 24, "float32", device="cuda")
    for _ in range(3):
        rc.allreduce_(x)
    torch.cuda.synchronize()
    rc.barrier()
    if rc.rank() == VICTIM:
        sleep(BUSY_S)
        if deed.is_late:
            rc.allreduce_(x)
        time.sleep(1)  # the others get to where they wait
        report(VICTIM, at=time.time())
        os.kill(os.getpid(), deed.signal)
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
    """Wait until all have said what they heard: the first that ends may end the others."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and len(list(Path.cwd().glob("[0-9].json"))) < SIZE:
        time.sleep(0.01)  # files of other processes


if __name__ == "__main__":
    if len(sys.argv) > 1:
        be_a_rank(DEEDS[sys.argv[1]])
    else:
        sys.exit(main())
