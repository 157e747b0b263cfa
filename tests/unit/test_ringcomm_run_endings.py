"""For each way in which an elastic job ends: its code, who is named, if it is started again."""

import pytest

from ringcomm.launch.job.plan_types import RunRequest
from ringcomm.launch.job.records import Evidence, RankEnd, RecordedFailure, deed_in
from ringcomm.launch.job.restart import Ended, decide
from ringcomm.launch.job.verdict import Cause, JobEnding, judge_ending, lost_ranks

DEAD, GOOD, IN_ORDER = RankEnd(), RankEnd(True, 0), RankEnd(True, 75)
SERVER = RankEnd(True, 0, "server 0")
WORKER, SPARE, EVALUATOR = RankEnd(role="worker"), RankEnd(role="spare"), RankEnd(role="evaluator")
SPARE_ENDED = RankEnd(True, 0, "spare")
TRAINED = RankEnd(True, 0, "worker")
ABORT, OWN, KILLED, SILENT, ASKED, MPI = Evidence

# Failures are (rank, code, evidence), in the order of time -> code, rank, cause.
ENDINGS = {
    # --- the program's own failures
    "all raise": (1, [DEAD] * 3, [(2, 1, OWN), (0, 1, OWN), (1, 1, OWN)], 1, 2, Cause.PROGRAM),
    "all call sys.exit(3) or os._exit(3)": (
        2, [DEAD] * 2, [(1, 3, OWN), (0, 3, OWN)], 3, 1, Cause.PROGRAM,
    ),
    "all abort": (
        1, [RankEnd(code=134)] * 2, [(0, 134, OWN), (1, 134, OWN)], 134, 0, Cause.PROGRAM,
    ),
    "one that is alone aborts, and no guardian is there": (
        1, [RankEnd(code=134)], [], 134, 0, Cause.PROGRAM,
    ),
    "all end with a code of their own, without a hook": (
        1, [RankEnd(True, 4)] * 2, [], 4, 0, Cause.PROGRAM,
    ),
    "all are ended in C code": (1, [DEAD] * 2, [(0, 3, MPI), (1, 3, MPI)], 3, 0, Cause.PROGRAM),
    "one after the other raises": (1, [DEAD] * 2, [(1, 1, OWN), (0, 7, OWN)], 1, 1, Cause.PROGRAM),
    "one raises, and others have followed it": (1, [DEAD] * 3, [(1, 1, OWN)], 1, 1, Cause.PROGRAM),
    "one raises, and the others are killed, who would have been enough": (
        2, [DEAD] * 4, [(0, 1, OWN), (1, 3, OWN), (2, 137, KILLED), (3, 137, KILLED)], 1, 0,
        Cause.PROGRAM,
    ),
    "one raises, and without it there are too few": (
        3, [IN_ORDER, DEAD, IN_ORDER], [(1, 1, OWN), (0, 75, OWN), (2, 75, OWN)], 1, 1,
        Cause.PROGRAM,
    ),
    "one raises after the others have come to their end, who are too few": (
        3, [GOOD, DEAD, GOOD], [(1, 1, OWN)], 1, 1, Cause.PROGRAM,
    ),
    "one calls MPI_Abort, and the launcher ends one of those that stop in order": (
        3, [RankEnd(True), DEAD, IN_ORDER], [(1, 7, ABORT), (2, 75, OWN), (0, 143, ASKED)], 7, 1,
        Cause.PROGRAM,
    ),
    "one calls MPI_Abort, and the launcher kills those that save after its SIGTERM": (
        2, [DEAD] * 3, [(1, 7, ABORT), (2, 0, SILENT), (0, 137, KILLED)], 7, 1, Cause.PROGRAM,
    ),
    "a server calls MPI_Abort, and the launcher ends the workers": (
        1, [WORKER, WORKER, RankEnd(role="server 0")],
        [(2, 7, ABORT), (0, 143, ASKED), (1, 137, KILLED)], 7, 2, Cause.PROGRAM,
    ),
    "one calls MPI_Abort of its own communicator, and one is enough": (
        1, [GOOD, DEAD], [(1, 7, ABORT)], 0, None, None,
    ),
    "none comes through init()": (1, [None, None], [], 1, None, Cause.START),
    # --- losses from outside
    "all are killed": (1, [DEAD] * 2, [(1, 137, KILLED), (0, 137, KILLED)], 137, 1, Cause.LOST),
    "all are dead, nobody knows how": (
        1, [DEAD] * 2, [(1, 0, SILENT), (0, 0, SILENT)], 137, 1, Cause.LOST,
    ),
    "nothing is known of any: their hosts were lost, and answer again": (
        1, [DEAD] * 2, [], 1, 0, Cause.LOST,
    ),
    "one is killed, and of the others nothing is known": (
        1, [DEAD] * 3, [(1, 137, KILLED)], 137, 1, Cause.LOST,
    ),
    "of some nothing is known, and the launcher has ended the others": (
        1, [DEAD] * 3, [(0, 143, ASKED), (1, 143, ASKED)], 143, 0, Cause.LOST,
    ),
    "some are killed, and MPI ends the others": (
        1, [DEAD] * 2, [(0, 1, MPI), (1, 137, KILLED)], 137, 1, Cause.LOST,
    ),
    "so many are killed that the others raise an error": (
        3, [DEAD] * 4, [(0, 137, KILLED), (1, 137, KILLED), (2, 1, OWN), (3, 1, OWN)], 1, 2,
        Cause.LOST,
    ),
    "one is killed, and without it there are too few": (
        3, [IN_ORDER, DEAD, IN_ORDER], [(1, 137, KILLED), (0, 75, OWN)], 75, None, Cause.TOO_FEW,
    ),
    "one raises, others are killed, and they alone were too many": (
        3, [IN_ORDER, DEAD, DEAD, DEAD], [(1, 1, OWN), (2, 137, KILLED), (3, 137, KILLED)], 75,
        None, Cause.TOO_FEW,
    ),
    "some cannot be reached": (2, [IN_ORDER] * 3, [(0, 75, OWN)], 75, None, Cause.TOO_FEW),
    "all workers are killed, and a spare has no state": (
        1, [DEAD, DEAD, SPARE], [(0, 137, KILLED), (1, 137, KILLED), (2, 1, OWN)], 137, 0,
        Cause.LOST,
    ),
    # --- asked to end, by somebody else than `ringcomm run`
    "all get SIGTERM": (
        1, [DEAD] * 2, [(None, 143, ASKED), (0, 143, ASKED), (1, 143, ASKED)], 143, None,
        Cause.ASKED,
    ),
    "one gets SIGTERM, and the other, a moment later, SIGKILL": (
        1, [DEAD] * 2, [(0, 143, ASKED), (1, 137, KILLED)], 137, 1, Cause.LOST,
    ),
    # --- enough are left
    "one is killed": (2, [GOOD, DEAD, GOOD], [(1, 137, KILLED)], 0, None, None),
    "one raises": (1, [GOOD, DEAD], [(1, 1, OWN)], 0, None, None),
    "one has left, and one is no rank any more": (
        1, [GOOD, GOOD, SPARE_ENDED], [], 0, None, None,
    ),
    # --- too few have come to their end
    "all fail after training, and a spare ends well": (
        1, [DEAD, DEAD, SPARE_ENDED], [(0, 1, OWN), (1, 1, OWN)], 1, 0, Cause.PROGRAM,
    ),
    "all workers raise beside a server": (
        1, [WORKER, WORKER, SERVER], [(1, 1, OWN), (0, 1, OWN)], 1, 1, Cause.PROGRAM,
    ),
    "all workers are killed beside a server": (
        1, [WORKER, WORKER, SERVER], [(1, 137, KILLED), (0, 137, KILLED)], 137, 1, Cause.LOST,
    ),
    "one raises beside a server, and one is enough": (
        1, [TRAINED, WORKER, SERVER], [(1, 1, OWN)], 0, None, None,
    ),
    "one raises beside a server, and two must be there": (
        2, [TRAINED, WORKER, SERVER], [(1, 1, OWN)], 1, 1, Cause.PROGRAM,
    ),
    "one is killed beside a server, and two must be there": (
        2, [TRAINED, WORKER, SERVER], [(1, 137, KILLED)], 137, 1, Cause.TRAINED,
    ),
    "that is seen in time: the others end in order": (
        2, [RankEnd(True, 75, "worker"), WORKER, RankEnd(True, 75, "server 0")],
        [(1, 137, KILLED), (0, 75, OWN), (2, 75, OWN)], 75, None, Cause.TOO_FEW,
    ),
    "likewise, after one has raised": (
        2, [RankEnd(True, 75, "worker"), WORKER, RankEnd(True, 75, "server 0")],
        [(1, 3, OWN), (0, 75, OWN), (2, 75, OWN)], 3, 1, Cause.PROGRAM,
    ),
    "a newcomer goes on alone": (
        1, [WORKER, WORKER, TRAINED, SERVER], [(0, 137, KILLED), (1, 1, OWN)], 0, None, None,
    ),
    "a spare without a place is no worker": (
        1, [WORKER, WORKER, SPARE_ENDED, SERVER], [(0, 1, OWN), (1, 1, OWN)], 1, 0, Cause.PROGRAM,
    ),
    "nor is an evaluator": (
        1, [WORKER, RankEnd(True, 0, "evaluator"), SERVER], [(0, 1, OWN)], 1, 0, Cause.PROGRAM,
    ),
    "an evaluator alone fails": (1, [TRAINED, EVALUATOR, SERVER], [(1, 1, OWN)], 0, None, None),
    "the last server is killed, and the workers follow": (
        1, [WORKER, WORKER, RankEnd(role="server 0")], [(2, 137, KILLED)], 137, 2, Cause.LOST,
    ),
    "the last server raises, and the workers follow": (
        1, [WORKER, WORKER, RankEnd(role="server 0")], [(2, 1, OWN)], 1, 2, Cause.PROGRAM,
    ),
}  # fmt: skip
STARTED_AGAIN = {Cause.LOST, Cause.TOO_FEW}


def verdict_of(name):
    least, ends, failures, *_ = ENDINGS[name]
    return judge_ending(
        JobEnding(
            size=len(ends),
            ends={rank: end for rank, end in enumerate(ends) if end is not None},
            seen=range(len(ends)),
            failures=tuple(
                RecordedFailure(rank, code, evidence, at, "x")
                for at, (rank, code, evidence) in enumerate(failures)
            ),
            launcher_code=0,
            least=least,
        )
    )


@pytest.mark.parametrize("name", ENDINGS)
def test_the_code_and_the_cause_of_an_elastic_job_follow_from_how_its_ranks_ended(name):
    verdict = verdict_of(name)
    assert (verdict.code, verdict.rank, verdict.cause) == ENDINGS[name][3:]


@pytest.mark.parametrize("name", ENDINGS)
def test_only_what_is_lost_from_outside_is_started_again_and_else_one_sentence_says_why(name):
    request = RunRequest(program=("train",), np=2, elastic=(1, 2))
    verdict = verdict_of(name)
    decision = decide(
        Ended(
            request=request, hosts=(), verdict=verdict, was_asked_to_stop=False, silent=(),
            n_restarts=0, limit=3,
        )
    )  # fmt: skip
    cause = ENDINGS[name][-1]
    assert (decision.request == request) == (cause in STARTED_AGAIN)
    assert bool(decision.why) == (cause is not None)
    if cause not in {None, *STARTED_AGAIN}:
        assert decision.why == f"{cause}, so the job is not started again"


def test_what_is_missing_is_said_if_too_few_have_ended_well():
    verdict = verdict_of("one is killed beside a server, and two must be there")
    assert verdict.what == "rank 1 failed; 1 worker has ended well, and there must be 2"


# --- what a rank did without which the others go on ---------------------------------------------
REPORT = "x rank 1 (host node7 (rack 2), pid 12) "
DEEDS = {
    "raised ValueError after step 21 - exit 1\n    ValueError: a (b)": "raised ValueError",
    "was killed by SIGKILL (out of memory?) after step 748": "killed by SIGKILL",
    "died of SIGSEGV": "died of SIGSEGV",
    "called sys.exit - exit 3": "called sys.exit",
    "called os._exit(3) before ringcomm.shutdown() after step 4": (
        "called os._exit(3) before ringcomm.shutdown()"
    ),
    "became another program (exec of /bin/true) after step 2": "became another program",
    "ended without a word (SIGKILL, out of memory, _exit or exec in C code)": (
        "ended without a word"
    ),
}


@pytest.mark.parametrize("said", DEEDS)
def test_what_a_rank_did_is_in_the_first_line_of_the_report_about_it(said):
    assert deed_in(f"{REPORT}{said}\n") == DEEDS[said]
    assert deed_in(f"{REPORT.strip()}, server 0, {said}\n") == DEEDS[said]


def lost_in(least, *failures):
    failures = [RecordedFailure(rank, code, kind, 1, text) for rank, code, kind, text in failures]
    ending = JobEnding(
        size=4, ends={}, seen=range(4), failures=tuple(failures), launcher_code=0, least=least
    )
    return lost_ranks(ending)


def test_an_elastic_job_has_lost_those_that_failed_and_none_that_ended_as_it_was_asked():
    raised = f"{REPORT}raised ValueError - exit 1\n"
    failures = [
        (1, 1, OWN, raised), (3, 1, OWN, ""), (0, 75, OWN, "x"), (2, 143, ASKED, "x"),
        (None, 130, ASKED, "x"),
    ]  # fmt: skip
    assert lost_in(1, *failures) == {1: "raised ValueError", 3: "raised ValueError"}
    assert lost_in(1, (2, 0, SILENT, "another form")) == {2: "ended without a word"}
    assert lost_in(None, *failures) == {}
