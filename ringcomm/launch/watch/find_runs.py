"""Finds the runs of a folder and the live jobs of this user on this host, by which names they have.

All commands find the run that a word means here: `ringcomm runs`, `logs`, `top`, `ctl`, `stacks`
and `dashboard`.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Final

from ringcomm._core import monotonic_ns
from ringcomm.launch.job.processes.local_ranks import live_ranks_here
from ringcomm.launch.job.records import RunConfig
from ringcomm.launch.job.run_folder import RunFolder, is_run_folder, near, runs_in, time_text
from ringcomm.launch.watch.find_ranks import Ranks
from ringcomm.launch.watch.other_hosts import of_run, reports, run_folder_of
from ringcomm.launch.watch.rank_rows import RankSample
from ringcomm.launch.watch.run_rows import MetricValues, RunFacts, over_text
from ringcomm.launch.watch.which_run import KnownRun, choose
from ringcomm.launched.process_stat import ProcessStat
from ringcomm.system_text import host_name, read_text

RUNS: Final = Path("runs")
_FRESH_S: Final = 10.0  # a host that has written nothing for so long is not heard of
_CLOCKS_S: Final = 2.0  # by which the times of a process and of a file may differ
_BLOCK: Final = 1 << 20
_MOST_NBYTES: Final = 1 << 30  # of a file of metrics


@dataclass(frozen=True)
class LiveJob:
    """A job that has a live rank on this host.

    Attributes:
        name: of the job.
        members: its live ranks on this host.
        folder: that of its run; None: it has none.
        working: the folders in which it works, and was started.
        began_s: when the first of its processes began, in seconds since 1970.
        program: the command of a rank.
    """

    name: str
    members: tuple[RankSample, ...]
    folder: Path | None
    working: tuple[str, ...]
    began_s: float
    program: tuple[str, ...]


def live_jobs(samples: Sequence[RankSample]) -> list[LiveJob]:
    """Return the jobs of these ranks of this host, which are in the order of jobs."""
    live = [each for each in samples if not each.is_over]
    return [_job(name, tuple(group)) for name, group in groupby(live, key=lambda each: each.job)]


def find(word: str, runs: Path, samples: Sequence[RankSample]) -> KnownRun:
    """Return the run, or live job, that a word means: the path of its folder, or see choose().

    Args:
        word: of the command line.
        runs: the folder of runs; a word such as other/2026-11 has another one.
        samples: the ranks of this host.

    Raises as choose() does.
    """
    if word and is_run_folder(Path(word)):
        path = Path(word).absolute()
        return KnownRun(str(path.resolve()), str(near(path)), True, _jobs_of(path, samples))
    if "/" in word.rstrip("/"):
        parent, _, word = word.rstrip("/").rpartition("/")
        known = known_runs(Path(parent or "/"), samples)
        return choose(word, [each for each in known if _is_in(each.folder, Path(parent or "/"))])
    return choose(word, known_runs(runs, samples))


def known_runs(runs: Path, samples: Sequence[RankSample]) -> list[KnownRun]:
    """Return the runs in a folder of runs, and all live jobs, which may be of other folders."""
    jobs = live_jobs(samples)
    names: defaultdict[str, list[str]] = defaultdict(list)  # of the jobs of a folder
    for job in jobs:
        names[os.path.realpath(job.folder) if job.folder else ""].append(job.name)
    found, is_seen = [], set()
    for path, began_s, is_own in runs_in(runs):
        is_seen.add(real := os.path.realpath(path))
        jobs_of_it = tuple(names.get(real, ()))
        found.append(KnownRun(str(path), str(near(path)), True, jobs_of_it, is_own, began_s))
    here = _working_folder()
    for job in jobs:
        if job.folder is None:
            place, is_here = job.working[0] if job.working else "?", here in job.working
            found.append(KnownRun("", place, is_here, (job.name,), began_s=job.began_s))
        elif (real := os.path.realpath(job.folder)) not in is_seen:
            is_seen.add(real)
            working = RunFolder(job.folder).config().working_folder
            is_here = bool(working) and os.path.realpath(working) == here
            path, jobs_of_it = job.folder, tuple(names[real])
            found.append(
                KnownRun(str(path), str(near(path)), is_here, jobs_of_it, True, job.began_s)
            )
    return found


def find_job(word: str, runs: Path = RUNS) -> tuple[Ranks, list[RankSample], KnownRun]:
    """Return the ranks of this host, the live ones of the only job that a word means, and its run.

    Raises LookupError if there is none, or more than one, or if others could have put it there.
    """
    ranks = Ranks()
    ranks.search()
    samples = ranks.sample(monotonic_ns())
    run = find(word, runs, samples)
    if run.folder:
        folder = RunFolder(Path(run.folder))
        if text := folder.distrust:
            raise LookupError(f"the folder of the run {run.place} {text}")
        samples = of_run(samples, folder.path)
        if all(each.is_over for each in samples):
            raise LookupError(why_not_live(run))
    else:
        samples = [each for each in samples if each.job in run.jobs]
    live = [each for each in samples if not each.is_over]
    jobs = sorted({each.job for each in live})
    if len(jobs) > 1:
        raise LookupError(f"the run {run.place} has several live jobs: {', '.join(jobs)}. Name one")
    return ranks, live, replace(run, jobs=tuple(jobs))


def why_not_live(run: KnownRun) -> str:
    """Return why a run has no live rank on this host: how and when it ended, or what it does."""
    facts = facts_of(run)
    if facts.end is not None or facts.is_live is False:
        return over_text(facts)
    if facts.is_finishing:
        return (
            f"all ranks of the run {run.place} have ended, or have left the job; the run is ending"
        )
    if facts.is_live and not facts.jobs:
        return f"no rank of the run {run.place} is through ringcomm.init() on this host"
    return f"no rank of the run {run.place} lives on this host"


def facts_of(
    run: KnownRun, metric: str = "", *, best: str = "min", samples: Sequence[RankSample] = ()
) -> RunFacts:
    """Return what is known of a run that has a folder.

    Args:
        run: the run.
        metric: a name of rc.log(), whose values of rank 0 are looked up; "": of none.
        best: "min" or "max".
        samples: the ranks of this host, which tell whether it is paused; (): not asked.
    """
    folder = RunFolder(Path(run.folder))
    try:
        config, end = folder.config(), folder.end()
        is_live = False if end is not None else _is_live(folder, config)
        is_finishing = bool(is_live) and not run.jobs and _are_all_done(folder, config)
        is_paused = bool(is_live and samples) and _is_paused(run, folder, samples)
        n_gone = len(_gone(folder)) if is_live else 0
        values = metric_of(folder, metric, best=best) if metric else None
    except OSError as error:  # it is not this user's to read, or has become a link
        config, end, is_live, values = RunConfig(), None, None, None
        is_finishing = is_paused = False
        n_gone = 0
        folder.problems[""] = str(error.strerror)
    problems = [f"{folder.path / name} {what}" for name, what in sorted(folder.problems.items())]
    name = run.names[0] if run.names else run.place
    return RunFacts(
        name, run.place, True, config, end, is_live, run.jobs, values, tuple(problems),
        is_finishing=is_finishing, is_paused=is_paused, n_gone=n_gone,
    )  # fmt: skip


def facts_of_job(run: KnownRun, samples: Sequence[RankSample], metric: str = "") -> RunFacts:
    """Return what is known of a live job that has no folder: of a metric the last value alone."""
    job = next(each for each in live_jobs(samples) if each.name in run.jobs)
    size = int(job.members[0].page["size"])
    config = RunConfig(job.program, size, time_text(job.began_s))
    first = next((each for each in job.members if each.rank == 0), None)
    last = [value for name, _, value in first.scalars if name == metric] if first else []
    values = MetricValues(last[0], None) if last and math.isfinite(last[0]) else None
    is_paused = any(each.is_paused for each in job.members)
    facts = RunFacts(job.name, run.place, False, config, None, True, run.jobs, values)
    return replace(facts, is_paused=is_paused)


def metric_of(folder: RunFolder, name: str, *, best: str) -> MetricValues | None:
    """Return the last and the best of what rank 0 has logged under a name; None without a number.

    What is no finite number does not count.
    """
    with folder.open_metrics() or contextlib.nullcontext() as file:
        if file is None:
            return None
        if os.fstat(file.fileno()).st_size > _MOST_NBYTES:
            folder.problems["metrics.jsonl"] = f"has more than {_MOST_NBYTES} bytes: it is not read"
            return None
        # Others may have written it: what the pattern takes for a number may be none.
        # Not within a longer name, where its quote has a backslash. A search for what begins with a
        # literal takes half the time.
        key = re.escape(f"{json.dumps(name)}: ".encode())
        pattern = re.compile(key + rb"(?<!\\" + key + rb")([-+.0-9eE]+)")
        choice = min if best == "min" else max
        found: MetricValues | None = None
        best_yet: float | None = None
        rest = b""
        while piece := file.read(_BLOCK):
            whole, _, rest = (rest + piece).rpartition(b"\n")
            if values := _numbers(pattern.findall(whole)):
                best_yet = choice(values if best_yet is None else [best_yet, *values])
                found = MetricValues(values[-1], best_yet)
            rest = rest[-_BLOCK:]  # a longer line is none of rc.log()
        return found


def _numbers(texts: Sequence[bytes]) -> list[float]:
    found = []
    for text in texts:
        try:
            number = float(text)
        except ValueError:
            continue
        if math.isfinite(number):
            found.append(number)
    return found


def _job(name: str, members: tuple[RankSample, ...]) -> LiveJob:
    first = min(members, key=lambda each: each.rank)
    pid = int(first.page["pid"])
    working: list[str] = []
    program: tuple[str, ...] = ()
    with contextlib.suppress(OSError):  # it has ended
        working.append(os.readlink(f"/proc/{pid}/cwd"))
    with contextlib.suppress(OSError):
        # A program may change its folder: it is also of the one in which it was started.
        match = re.search(r"(?:^|\0)PWD=([^\0]+)", read_text(f"/proc/{pid}/environ"))
        if match:
            working.append(os.path.realpath(match[1]))
    with contextlib.suppress(OSError):
        program = tuple(read_text(f"/proc/{pid}/cmdline").split("\0")[:-1])
    began_s = _began_s(pid) or time.time()
    return LiveJob(name, members, _folder_of(pid), tuple(working), began_s, program)


def _folder_of(pid: int) -> Path | None:
    """Return the folder of the run that a rank is recorded in; what a rank has started is not."""
    path = run_folder_of(pid)
    with contextlib.suppress(OSError):  # it is gone
        if path is not None and pid in [each.pid for each in RunFolder(path).ranks().values()]:
            return path
    return None


def _jobs_of(path: Path, samples: Sequence[RankSample]) -> tuple[str, ...]:
    real = os.path.realpath(path)
    jobs = live_jobs(samples)
    return tuple(
        job.name for job in jobs if job.folder is not None and os.path.realpath(job.folder) == real
    )


def _is_in(folder: str, parent: Path) -> bool:
    return bool(folder) and os.path.realpath(Path(folder).parent) == os.path.realpath(parent)


def _is_live(folder: RunFolder, config: RunConfig) -> bool | None:
    """Return True if a run that has no end lives; None if only other hosts know."""
    if live_ranks_here(folder):
        return True
    is_of_here = config.host == host_name()
    if is_of_here and _is_starter(config.pid, folder):
        return True
    found = reports(folder)
    if any(each.age_s < _FRESH_S and not all(r.is_over for r in each.ranks) for each in found):
        return True
    return False if is_of_here else None


def _are_all_done(folder: RunFolder, config: RunConfig) -> bool:
    """Return True if each rank has left the job, or has ended, as far as this host can know."""
    left = {rank for rank, end in folder.ends().items() if end.has_left}
    gone, processes = _gone(folder) | left, folder.ranks()

    def is_done(rank: int) -> bool:
        if rank in gone:
            return True
        process = processes.get(rank)
        return process is not None and process.host == host_name() and not process.lives

    return config.ranks is not None and all(map(is_done, range(config.ranks)))


def _is_paused(run: KnownRun, folder: RunFolder, samples: Sequence[RankSample]) -> bool:
    here = [each for each in samples if each.job in run.jobs]
    elsewhere = [rank for report in reports(folder) for rank in report.ranks]
    return any(each.is_paused for each in here or elsewhere)


def _gone(folder: RunFolder) -> set[int]:
    """Return the ranks of a live run that have died or ended."""
    failed = {each.rank for guardian in folder.guardians() for each in guardian.failures}
    ended = {rank for rank, end in folder.ends().items() if end.code is not None}
    return ended | {rank for rank in failed if rank is not None}


def _is_starter(pid: int, folder: RunFolder) -> bool:
    """Return True if `ringcomm run` may still run: no process has got its pid since."""
    began_s = _began_s(pid) if pid else None
    with contextlib.suppress(OSError):
        return began_s is not None and began_s <= folder.began_s() + _CLOCKS_S
    return False


def _began_s(pid: int) -> float | None:
    """Return when a process began, in seconds since 1970; None if it has ended."""
    try:
        process = ProcessStat.of(pid)
    except OSError:
        return None
    if process.is_dead:
        return None
    ago_s = time.clock_gettime(time.CLOCK_BOOTTIME) - process.start / os.sysconf("SC_CLK_TCK")
    return time.time() - ago_s


def _working_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it was removed
        return ""
