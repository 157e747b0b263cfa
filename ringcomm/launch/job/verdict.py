"""Judges how a job ended, by what its ranks recorded rather than by mpirun's exit code. Pure.

Measured with Open MPI 5 and MPICH 5: mpirun returns 1, 137 or -11 for jobs whose ranks all ended
well, and 0 for some in which a rank died.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from ringcomm.launch.job.records import Evidence, RankEnd, RecordedFailure, deed_in

STOPPED_IN_ORDER: Final = 75  # EX_TEMPFAIL: start it again to go on
SIGNAL_NAMES: Final = {1: "SIGHUP", 2: "SIGINT", 15: "SIGTERM"}  # those that ask a job to stop
_OTHER_NAMES: Final = {3: "SIGQUIT", 4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE",
                       9: "SIGKILL", 11: "SIGSEGV", 13: "SIGPIPE", 24: "SIGXCPU"}  # fmt: skip
# Codes of ranks that have done as they were asked; 137: after the grace period, by SIGKILL.
_OBEYED: Final = (STOPPED_IN_ORDER, 129, 130, 137, 143)
_SIGKILL: Final = 9
_BY_SIGKILL: Final = 128 + _SIGKILL
_BY_SIGTERM: Final = 128 + 15
_SUREST: Final = tuple(Evidence)


class Cause(StrEnum):
    """Why an elastic job has ended with a code other than 0."""

    START = "the job has not come through ringcomm.init()"
    PROGRAM = "the program has failed by itself"
    ASKED = "the ranks were asked to end"
    TRAINED = "a worker has come to its end"
    LAUNCHER = "the launcher was killed, and its ranks with it"
    LOST = "the job has lost all its workers"
    TOO_FEW = "the job could not go on, and its ranks have ended in order"


@dataclass(frozen=True, kw_only=True)
class JobEnding:
    """All that is known when the launcher has ended.

    Attributes:
        size: number of ranks.
        ends: what each rank recorded; ranks that never called init() have recorded nothing.
        seen: the ranks that can record: their hosts see the folder of the run.
        failures: what guardians reported.
        launcher_code: exit code of mpirun or srun; -N: signal N ended it.
        launcher_text: what it printed last.
        asked: the signal by which the job was asked to stop, if it was.
        least: with so many workers an elastic job goes on after deaths; None: it is not elastic.
        is_stopped: all ranks have taken the command to stop, of `ringcomm ctl` or a signal.
        lost_before_init: a rank that ended before init(), if the others waited for it in vain.
        has_hung: the launcher was ended because it hung after all ranks: its code means nothing.
        aborted: the ranks that have said so in MPI_Abort, of MPICH and Intel MPI.
        launcher: what it is called.
        is_launcher_ended: it was ended by this command, for another reason than `asked`.
    """

    size: int
    ends: Mapping[int, RankEnd]
    seen: Collection[int]
    failures: tuple[RecordedFailure, ...] = ()
    launcher_code: int
    launcher_text: str = ""
    asked: int | None = None
    least: int | None = None
    is_stopped: bool = False
    lost_before_init: int | None = None
    has_hung: bool = False
    aborted: Collection[int] = ()
    launcher: str = "mpirun"
    is_launcher_ended: bool = False


@dataclass(frozen=True)
class Verdict:
    code: int  # exit code of `ringcomm run`
    what: str  # in words
    rank: int | None = None  # the one that failed first, if it is known
    report: str = ""  # the guardian's report about it, if there is one
    cause: Cause | None = None  # of an elastic job's code, unless that is 0


def judge_ending(ending: JobEnding) -> Verdict:
    """Return the verdict: the first of these rules that applies."""
    rules = (
        _could_not_go_on,
        _lost_launcher,
        _failed_rank,
        _stopped,
        _completed,
        _bad_exit,
        _by_launcher,
    )
    verdict = next(verdict for rule in rules if (verdict := rule(ending)) is not None)
    if ending.least is None or verdict.code == 0 or verdict.cause is not None:
        return verdict
    return replace(verdict, cause=_cause(ending))


def lost_ranks(ending: JobEnding) -> dict[int, str]:
    """Return the ranks without which an elastic job went on, and what each did, in words."""
    found: dict[int, str] = {}
    deed = ""
    for each in ending.failures if ending.least is not None else ():
        deed = deed_in(each.text) if each.text else deed  # one without a text did what another did
        if each.rank is not None and _kind(each) is not Evidence.ASKED:
            found[each.rank] = deed or "ended without a word"
    return found


def _could_not_go_on(e: JobEnding) -> Verdict | None:
    """The ranks of an elastic job that have not died have saved a checkpoint, and stopped.

    If there are enough together with those that failed by themselves, that failure counts. So does
    an MPI_Abort, after which the launcher ends those that would have been enough.
    """
    if e.least is None or e.asked is not None or e.is_stopped or _aborting(e):
        return None
    dead = _dead(e)
    codes = {end.code for rank, end in e.ends.items() if rank not in dead}
    codes -= {None, 0}  # 0: of rc.elastic.leave()
    if codes != {STOPPED_IN_ORDER}:
        return None
    n_failed = sum(_trains(e, each.rank) and _kind(each) is Evidence.OWN for each in e.failures)
    n_left = sum(bool(end.code) and end.may_train for end in e.ends.values())
    if n_failed and n_failed + n_left >= e.least:
        return None
    what = "too few ranks were left, or some could not be reached"
    return Verdict(STOPPED_IN_ORDER, what, cause=Cause.TOO_FEW)


def _lost_launcher(e: JobEnding) -> Verdict | None:
    """A signal has ended the launcher, and its ranks have ended because of that.

    A rank's own deed comes first. A rank that was killed has failed before if the launcher has
    named it: when MPICH's is lost, its proxies kill all ranks.
    """
    number = -e.launcher_code
    if number <= 0 or e.is_launcher_ended or e.has_hung or e.asked is not None or e.is_stopped:
        return None
    if _are_done(e) or e.lost_before_init is not None or _named_by_launcher(e) is not None:
        return None
    if any(_kind(each) in (Evidence.ABORT, Evidence.OWN) for each in _culprits(e)):
        return None
    name = (SIGNAL_NAMES | _OTHER_NAMES).get(number, f"signal {number}")
    what = f"the launcher, {e.launcher}, was killed by {name}, and not the program"
    cause = None if e.least is None else Cause.LAUNCHER
    return Verdict(128 + number, what, cause=cause)


def _cause(e: JobEnding) -> Cause:
    """Return why an elastic job has ended that has not come to its end, nor ended in order.

    Its launcher ends no rank because another one has failed, unless that called MPI_Abort. But if
    so many are killed that the others cannot go on, these may raise an error because of that.
    """
    if not e.ends:
        return Cause.START
    if _aborting(e):
        return Cause.PROGRAM
    assert e.least is not None
    ends = {rank: e.ends.get(rank, RankEnd()) for rank in range(e.size)}
    workers = {rank: end for rank, end in ends.items() if end.is_worker}
    kinds = {each.rank: _kind(each) for each in _culprits(e)}
    killed = {rank for rank, kind in kinds.items() if kind in (Evidence.KILLED, Evidence.SILENT)}
    has_trained = any(_is_good(e, rank) for rank in workers)
    n_others = sum(end.may_train for rank, end in ends.items() if rank not in killed)
    if n_others < e.least and not has_trained:
        return Cause.LOST
    has_failed = any(end.code not in (None, 0, STOPPED_IN_ORDER) for end in workers.values())
    if has_failed or Evidence.OWN in kinds.values():
        return Cause.PROGRAM
    if has_trained:
        return Cause.TRAINED
    if (
        killed or workers.keys() - kinds.keys()
    ):  # of the others nothing is known: their host is lost
        return Cause.LOST
    return Cause.ASKED if Evidence.ASKED in kinds.values() else Cause.PROGRAM


def _failed_rank(e: JobEnding) -> Verdict | None:
    """Guardians have seen which rank of their host failed first."""
    culprits = _culprits(e)
    if not culprits or _are_done(e):
        return None
    first = min(culprits, key=_doubt)
    assert first.rank is not None
    if e.asked is not None and first.code in (0, *_OBEYED):
        return None
    if e.is_stopped and first.code == STOPPED_IN_ORDER:
        return None
    if first.evidence is Evidence.ASKED and _stops(e):  # with others
        return None
    code = first.code or _code_of_silent(e, first.rank)
    what = f"rank {first.rank} failed"
    if e.least is not None and (n := len(_good_workers(e))):
        what += (
            f"; {n} worker{'s have' if n > 1 else ' has'} ended well, and there must be {e.least}"
        )
    return Verdict(code, what, first.rank, first.text)


def _code_of_silent(e: JobEnding, rank: int) -> int:
    """Return the exit code of a rank that has died, nobody knows how.

    It is the launcher's, unless that is of another rank: MPI ends ranks of other hosts, and the
    launcher may hear of such a one first. Nor is it the 1 or 0 that mpirun returns for an elastic
    job whose ranks have all died. Only SIGKILL keeps a rank from recording its end.
    """
    code, named = _code_of_launcher(e), _named_by_launcher(e)
    if e.has_hung and named is None:
        return _BY_SIGKILL
    others = {each.code for each in _culprits(e) if each.rank != rank}
    others |= {end.code for other, end in e.ends.items() if other != rank and end.code is not None}
    is_of_another = code in others if named is None else named != rank
    if e.least is not None and named is None and code in (0, 1):
        return _BY_SIGKILL
    return _BY_SIGKILL if code != 0 and is_of_another else code or 1


def _doubt(failure: RecordedFailure) -> tuple[int, int]:
    """Order failures that guardians of several hosts saw, the likeliest cause first.

    MPI and launchers end the ranks of the other hosts. The clocks of hosts differ, so what ended a
    rank counts before the time.
    """
    return _SUREST.index(_kind(failure)), failure.time_ns


def _kind(failure: RecordedFailure) -> Evidence:
    """Return by what it is known; who ends with 75 has done as it was asked."""
    return Evidence.ASKED if failure.code == STOPPED_IN_ORDER else failure.evidence


def _stopped(e: JobEnding) -> Verdict | None:
    """The job was asked to stop, by us or by somebody else."""
    stops = _stops(e)
    report = stops[0].text if stops else ""
    if e.asked is None:
        is_good = not stops or _are_done(e)
        return None if is_good else Verdict(stops[0].code, "ended from outside", report=report)
    name = SIGNAL_NAMES[e.asked]
    if _are_done(e) or STOPPED_IN_ORDER in [end.code for end in e.ends.values()]:
        return Verdict(STOPPED_IN_ORDER, f"stopped in order after {name}")
    return Verdict(128 + e.asked, f"ended by {name}", report=report)


def _completed(e: JobEnding) -> Verdict | None:
    """Each rank has recorded a good end: whatever the launcher says."""
    if e.is_stopped and (_are_done(e) or STOPPED_IN_ORDER in [x.code for x in e.ends.values()]):
        return Verdict(STOPPED_IN_ORDER, "stopped in order by a signal or by `ringcomm ctl`")
    return Verdict(0, "completed") if _are_done(e) else None


def _are_done(e: JobEnding) -> bool:
    counts = {*range(e.size)} - _dead(e)
    is_enough = e.least is None or len(_good_workers(e)) >= e.least
    return bool(e.ends) and is_enough and all(_is_good(e, rank) for rank in counts)


def _good_workers(e: JobEnding) -> list[int]:
    counts = {*range(e.size)} - _dead(e)
    return [rank for rank in counts if _trains(e, rank) and _is_good(e, rank)]


def _dead(e: JobEnding) -> set[int | None]:
    """Return the ranks whose death is no failure of the job, as long as enough workers live."""
    is_none = e.least is None
    return {x.rank for x in e.failures if not is_none and x.code != STOPPED_IN_ORDER}


def _is_good(e: JobEnding, rank: int) -> bool:
    """Return True if a rank has recorded a good end.

    os._exit() after shutdown() leaves no exit code, nor does a rank that never calls init(), as
    beside those of init(comm). Then, too, the launcher's counts, unless that is 0 in any case.
    """
    end = e.ends.get(rank, RankEnd())
    is_without_init = e.least is None and rank not in e.ends
    may_have_none = end.has_left or rank not in e.seen or is_without_init
    is_launcher_good = e.launcher_code == 0 and not e.has_hung
    if end.code is None:
        return is_launcher_good and may_have_none
    is_asked = e.asked is not None or e.is_stopped
    return end.code == 0 or (is_asked and end.code == STOPPED_IN_ORDER)


def _trains(e: JobEnding, rank: int | None) -> bool:
    return rank is not None and e.ends.get(rank, RankEnd()).is_worker


def _stops(e: JobEnding) -> list[RecordedFailure]:
    return [each for each in e.failures if each.rank is None]


def _culprits(e: JobEnding) -> list[RecordedFailure]:
    """Return the failures of ranks; in an elastic job of workers alone, if any have failed.

    What others do there follows from it: spares get no state, and servers have nobody to serve.
    But MPI_Abort, of any rank, ends all of them.
    """
    failed = [each for each in e.failures if each.rank is not None]
    if e.least is None:
        return failed
    if aborting := _aborting(e):
        return aborting
    return [each for each in failed if _trains(e, each.rank)] or failed


def _aborting(e: JobEnding) -> list[RecordedFailure]:
    return [each for each in e.failures if each.evidence is Evidence.ABORT]


def _bad_exit(e: JobEnding) -> Verdict | None:
    """A rank has recorded a bad exit code, and no guardian was there, as in a job of 1 rank."""
    bad = {rank: end.code for rank, end in sorted(e.ends.items()) if end.code}
    if not bad:
        return None
    named = _named_by_launcher(e)
    rank = named if named in bad else next(iter(bad))
    assert rank is not None
    return Verdict(bad[rank] or 1, f"rank {rank} failed", rank)


def _by_launcher(e: JobEnding) -> Verdict:
    """The ranks have recorded too little: they never called init(), or no guardian saw them die."""
    code, rank = _code_of_launcher(e), _named_by_launcher(e)
    if e.lost_before_init is not None:
        code = 1 if code in (0, _BY_SIGTERM) else code  # that of a launcher which did not end
        what = f"rank {e.lost_before_init} ended before it was through init()"
        return Verdict(code, what, e.lost_before_init)
    is_unknown = e.has_hung and rank is None
    if is_unknown and not e.ends:
        return Verdict(code, "the launcher hung, and only it knew how the ranks ended")
    if code == 0 and not e.ends and e.least is not None:  # the launcher's is 0 in any case
        return Verdict(1, "no rank has come through ringcomm.init(): see their logs")
    if code == 0 and not e.ends:
        return Verdict(0, "completed")
    if code == 0 or is_unknown:
        rank = next(r for r in range(e.size) if e.ends.get(r, RankEnd()).code is None)
        return Verdict(1, f"rank {rank} has not recorded a good end", rank)
    rank = 0 if e.size == 1 else rank
    return Verdict(code, "the job failed" if rank is None else f"rank {rank} failed", rank)


# --- what launchers say -------------------------------------------------------------------------
_SIGNALS: Final = (
    r"exited on\s+signal (\d+)",  # Open MPI, which breaks the line
    r"EXIT STRING: .*\(signal (\d+)\)",  # MPICH
)
_BY_SIGNAL: Final = r"RANK (\d+) PID \d+ RUNNING AT .*\n=\s+KILLED BY SIGNAL: (\d+)"  # Intel MPI
_EXIT_CODE: Final = r"Exit code:\s+(\d+)"  # Open MPI
_RANKS: Final = (
    r"process rank (\d+) with PID",
    r"Process name: \[.*[,@]\s*(\d+)\]",
    r"task (\d+): (?:Exited|Killed|Segmentation|Aborted|Terminated)",  # srun
)


def _code_of_launcher(e: JobEnding) -> int:
    """Return the launcher's exit code, as 128 + signal if a signal ended it or a rank.

    MPICH's mpiexec returns the bare number of the signal, and Intel MPI's 255.
    """
    code = 128 - e.launcher_code if e.launcher_code < 0 else e.launcher_code
    if code != 0 and (killed := _killed_says_intel(e)):
        rank = _named_by_launcher(e) if e.lost_before_init is None else e.lost_before_init
        number = killed.get(rank)
        number = _SIGKILL if number is None and len(killed) == e.size else number
        return code if number is None else 128 + number
    if e.has_hung:  # it may have said this much before
        match = re.search(_EXIT_CODE, e.launcher_text)
        code = int(match[1]) if match else 1
    for pattern in _SIGNALS:
        if code != 0 and (match := re.search(pattern, e.launcher_text)):
            return 128 + int(match[1])
    return code


def _killed_says_intel(e: JobEnding) -> dict[int | None, int]:
    """Return the signals that have ended ranks, by rank, if this is Intel MPI's launcher.

    It names all of them, also those that it has killed itself by SIGKILL, but no rank that has
    exited; and it returns 255 in each case.
    """
    return {int(rank): int(number) for rank, number in re.findall(_BY_SIGNAL, e.launcher_text)}


def _named_by_launcher(e: JobEnding) -> int | None:
    if killed := _killed_says_intel(e):
        first = [rank for rank, number in killed.items() if number != _SIGKILL]
        exited = {*range(e.size)} - killed.keys()
        alone = first or [*exited] or [*killed]
        return alone[0] if first or len(alone) == 1 else None
    for pattern in _RANKS:
        if match := re.search(pattern, e.launcher_text):
            return int(match[1])
    return min(e.aborted) if len(e.aborted) == 1 else None
