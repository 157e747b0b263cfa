"""After an error that no rank's death caused, all ranks can shutdown() and init() again."""

import textwrap

import pytest
from harness import PROMPTLY_S, at_length, run_script

PRELUDE = """
import os, sys, threading, time
import numpy as np
import ringcomm as rc
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.transport import failure_news
from ringcomm.transport.control_header import ControlHeader, ControlKind
failure_news.DIRECT = int(os.environ.get("DIRECT", failure_news.DIRECT))
X = np.ones(int(os.environ.get("COUNT", 1000)), np.float32)

def gives_up(place):
    # Rank 1 comes only when the others have waited in vain; a file says so, for no message may.
    if rc.rank() == 1:
        while not os.path.exists(place):
            time.sleep(0.01)
    try:
        rc.allreduce(X, name="late")
    except rc.CommTimeoutError as error:
        open(place, "w").close()
        return "all call shutdown(), then init()" in str(error)

def reborn():
    rc.shutdown()
    assert not rc.is_initialized()
    rc.init()
    wire = engine().transport
    late = ControlHeader(ControlKind.FAILED, wire.ring_epoch - 1, 0, about=rc.rank())
    late = late.pack("failed before\\n0")
    wire.control((rc.rank() + 1) % rc.size(), late)
    for _ in range(3):
        assert rc.allreduce(X)[0] == rc.size()
        assert rc.allreduce(X, name="w")[0] == rc.size()
    print("reborn", flush=True)
"""


def script(body):
    return PRELUDE + textwrap.dedent(body)


LIVES = """
from mpi4py import MPI
world = MPI.COMM_WORLD
sides = world.Split(world.rank % 2).Create_intercomm(0, world, 1 - world.rank % 2)
for wrong in (MPI.COMM_NULL, [0, 1], sides):
    try:
        rc.init(wrong)
    except (TypeError, ValueError) as error:
        assert str(error).startswith("ringcomm.init: comm is "), error
    else:
        raise AssertionError(f"{wrong} is taken for a communicator of ranks")
rc.init(sides.Merge())
assert rc.allreduce(X[:10])[0] == 3
rc.shutdown()
print("refused", flush=True)

rc.init()
rc.allreduce(X)
for life in range(2):
    assert gives_up(f"life.{life}")
    reborn()
    print("timed out", flush=True)

X = X[:1000]
if rc.rank() == 0:
    assert gives_up("over")
while not os.path.exists("over"):
    time.sleep(0.01)
reborn()
print("untold", flush=True)

if rc.rank() != 0:
    try:
        rc.allreduce(X)
    except rc.PeerFailedError as error:
        assert error.rank == 0 and "called shutdown()" in str(error)
reborn()
print("missed", flush=True)
rc.shutdown()
"""


@pytest.fixture(
    scope="module", params=at_length([("node", 1000), ("ring", 4_000_000)], [("ring", 4_000_000)])
)
def lives(request, tmp_path_factory):
    """A job whose 3 ranks begin anew after one error and the next."""
    algorithm, count = request.param
    environment = {"RINGCOMM_TIMEOUT_S": "3", "RINGCOMM_ALGORITHM": algorithm, "COUNT": str(count)}
    if algorithm == "ring":
        environment["DIRECT"] = "1"  # news is passed on, as among thousands
    return run_script(3, PRELUDE + LIVES, cwd=tmp_path_factory.mktemp("lives"), env=environment)


def test_what_is_no_communicator_of_ranks_is_refused_and_the_job_goes_on(lives):
    assert lives.output.count("refused\n") == 3, lives.output


def test_after_a_timeout_ranks_that_live_begin_anew(lives):
    assert lives.output.count("timed out\n") == 6, lives.output


def test_a_rank_that_no_error_reached_begins_anew_with_the_others(lives):
    assert lives.output.count("untold\n") == 3, lives.output


def test_ranks_that_missed_one_that_had_shut_down_begin_anew_with_it_and_end_well(lives):
    assert lives.output.count("missed\n") == 3, lives.output
    assert lives.code == 0, lives.output
    assert "x rank" not in lives.output


def test_a_process_alone_whose_init_failed_is_no_rank(tmp_path):
    body = """
    exits = sys.exit, os._exit, sys.excepthook
    os.environ["RINGCOMM_TIMELINE"] = "no such folder/trace"
    try:
        rc.init()
    except OSError:
        assert exits == (sys.exit, os._exit, sys.excepthook)
    del os.environ["RINGCOMM_TIMELINE"]
    rc.init()
    assert rc.allreduce(X)[0] == 1
    rc.shutdown()
    assert exits == (sys.exit, os._exit, sys.excepthook)
    """
    job = run_script(1, script(body), cwd=tmp_path)
    assert job.code == 0, job.output


@pytest.mark.at_length
def test_shutdown_after_a_timeout_waits_for_nobody_and_init_names_who_is_missing(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        time.sleep(30)  # for ever: the job ends long before
    try:
        rc.allreduce(X)
    except rc.CommTimeoutError:
        pass
    start = time.monotonic()
    rc.shutdown()
    assert time.monotonic() - start < 4
    rc.init()
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_TIMEOUT_S": "5"})
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "ranks that have not called shutdown(): 1" in job.output


def test_after_a_failure_nobody_begins_anew(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        threading.Thread(target=lambda: 1 / 0).start()  # a failure that its process outlives
        time.sleep(2.5)
    try:
        rc.allreduce(X)
    except rc.PeerFailedError as error:
        assert error.rank == 1
    rc.shutdown()
    try:
        rc.init()
    except rc.RingcommError as error:
        print("refused:", error, flush=True)
        raise
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_TIMEOUT_S": "5"})
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "refused: " in job.output
    assert "reborn" not in job.output


def test_a_job_that_ends_after_a_timeout_and_shutdown_has_failed(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 0:
        try:
            rc.allreduce(X)
        except rc.CommTimeoutError:
            pass
        rc.shutdown()
    else:
        time.sleep(6)
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_TIMEOUT_S": "3"})
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
