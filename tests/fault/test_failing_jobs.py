"""Whole jobs that go wrong, beyond the safety matrix of ci/safety: one mpirun each."""

import json
import re
import signal
import sys
import textwrap

import pytest
from harness import (
    HANG_S,
    IS_MPICH,
    PROMPTLY_S,
    above_mpi,
    at_length,
    finish_job,
    is_running,
    job_environment,
    run_command,
    run_script,
    start_job,
    wait_until,
)

PRELUDE = """
import os, signal, subprocess, sys, threading, time
import numpy as np
import ringcomm as rc
X = np.ones(1000, np.float32)
"""
# Where no launcher ends the ranks first.
CONTINUOUS, ULFM = ("--runtime-options", "continuous"), ("--with-ft", "ulfm")
LATE = {"RINGCOMM_TIMEOUT_S": "3", "RINGCOMM_GRACE_S": "1"}  # nobody saves anything


def script(body):
    return PRELUDE + textwrap.dedent(body)


def last_lines(output, n=15):
    return "\n".join([line for line in output.splitlines() if line.strip()][-n:])


def report_of(output):
    """Return the report without the launcher's own lines around it."""
    return re.search(r"^x .*(?:\n  .*)*", output, re.MULTILINE).group(0)


@above_mpi
def test_an_error_alike_on_all_ranks_is_printed_once(tmp_path):
    body = """
    rc.init()
    rc.barrier()
    raise ValueError("a batch of 7")
    """
    for _ in range(3):  # a rank that raises once the first one is gone prints it, too
        job = run_script(3, script(body), cwd=tmp_path)
        if job.output.count("Traceback") == 1:
            break
    assert job.code != 0
    assert job.output.count("Traceback") == 1, job.output
    report = report_of(job.output)
    assert "raised ValueError - exit 1" in report
    others = re.search(r"likewise: ranks (\d),(\d)$", report, re.MULTILINE)
    assert {*others.groups()} | {report.split()[2]} == set("012"), report


@above_mpi
def test_an_error_in_init_is_reported_as_such_when_the_others_already_watch(tmp_path):
    body = """
    if (os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]) == "1":
        os.environ["RINGCOMM_TIMELINE"] = "no such folder/trace"
    rc.init()
    """
    for _ in range(3):  # the guardian cannot report a rank that is gone before it starts
        job = run_script(2, script(body), cwd=tmp_path)
        if "x rank 1" in job.output:
            break
    assert job.code != 0
    report = report_of(job.output)
    assert re.match(r"x rank 1 \(.*\) raised FileNotFoundError", report), job.output


@above_mpi
def test_an_error_in_init_is_printed_once_though_no_rank_knows_another(tmp_path):
    body = """
    open(f"{os.getpid()}.here", "w").close()
    while len([name for name in os.listdir() if name.endswith(".here")]) < 2:
        time.sleep(0.001)
    rc.init()
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_TIMEOUT": "1"})
    assert job.code != 0
    assert job.output.count("Traceback") == 1, job.output
    assert job.output.count("ConfigError: RINGCOMM_TIMEOUT is not a setting") == 1


def test_a_rank_that_ends_early_is_named_as_having_left(tmp_path):
    body = """
    rc.init()
    rc.allreduce(X)
    if rc.rank() == 1:
        sys.exit(0)
    rc.allreduce(X, name="second")
    """
    job = run_script(3, script(body), cwd=tmp_path)
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    report = report_of(job.output)
    assert re.search(r"x rank 1 .* left the job while others waited for it", report)
    for rank in (0, 2):  # in one line, unless one has come later
        assert re.search(rf"ranks? (0,2|{rank}) in allreduce\[second\]", report), report


@above_mpi
def test_system_exit_without_sys_exit_is_seen(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        raise SystemExit(3)
    rc.allreduce(X, name="w")
    """
    job = run_script(2, script(body), cwd=tmp_path)
    assert job.code != 0
    assert "x rank 1" in report_of(job.output)


@pytest.mark.parametrize(("rank", "delay_s"), [(1, 1)] if IS_MPICH else [(0, 0), (1, 1)])
def test_a_late_failure_is_the_job_s_although_the_other_was_done(rank, delay_s, tmp_path):
    body = f"""
    class Knot:
        def __del__(self):
            print("collected", flush=True)
    rc.init()
    rc.barrier()
    if rc.rank() == {rank}:
        knot = Knot()
        knot.itself = knot
        time.sleep({delay_s})  # the other is at its end meanwhile
        raise ValueError("boom")
    """
    job = run_script(2, script(body), cwd=tmp_path)
    assert job.code != 0, job.output
    assert f"x rank {rank}" in report_of(job.output)
    assert "collected" not in job.output  # with torch that takes a second of CPU per rank


# On a busy machine the guardian comes late: here it is stopped while the rank ends.
WITH_A_LATE_GUARDIAN = """from ringcomm.engine.api import world
        guardian = world.current().guardian._process.pid
        os.kill(guardian, signal.SIGSTOP)
        wake = f"sleep 0.5; kill -CONT {guardian}"
        # MPICH's launcher ends the process group of a rank that has failed.
        subprocess.Popen(["sh", "-c", wake], start_new_session=True)"""


# Rank 1 leaves meanwhile, and the program does not look at what became of its operation.
AFTER_THE_OTHER = """while not handle.done():
            time.sleep(0.01)  # done() alone tells, for wait() would raise"""


ENDS = ["rc.shutdown()", "pass", WITH_A_LATE_GUARDIAN, AFTER_THE_OTHER]


@pytest.mark.parametrize("end", ENDS[1:2] if IS_MPICH else ENDS, ids=range(1 if IS_MPICH else 4))
def test_what_cannot_be_completed_at_the_end_is_the_job_s_failure(end, tmp_path):
    body = f"""
    rc.init()
    if rc.rank() == 0:
        handle = rc.allreduce_async(X, name="w")
        {end}
    """
    job = run_script(2, script(body), cwd=tmp_path)
    assert job.code != 0, job.output
    assert "x rank 1" in report_of(job.output)
    assert "left the job while others waited for it" in job.output


@pytest.mark.skipif(IS_MPICH, reason="ULFM is Open MPI's")
def test_a_stopped_rank_does_not_outlive_a_fault_tolerant_job(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    rc.allreduce(X, name="w")
    """
    job = run_script(2, script(body), cwd=tmp_path, env=LATE, options=ULFM, timeout_s=HANG_S)
    assert "for rank 1, which did not answer" in job.output


@above_mpi
def test_the_same_exit_code_everywhere_is_the_job_s_however_long_ranks_take_to_end(tmp_path):
    body = """
    import atexit
    atexit.register(time.sleep, 600)  # behind what init() registers: it is ended in there
    rc.init()
    rc.allreduce(X)
    rc.barrier()
    sys.exit(7)
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_GRACE_S": "0.5"})
    # MPICH's launcher kills who has not exited yet when the first has, and tells of that.
    assert job.code == 7 or (IS_MPICH and job.code == 9)
    assert "called sys.exit" in report_of(job.output)


def test_an_exception_before_init_ends_the_job(tmp_path):
    # A rank that connects while prterun 5 ends the job can hang prterun: let rank 0 be inside.
    # One that waits in MPICH, which does not end the job, burns two cores until the limit.
    pause_s, limit_s = (0.1, "1") if IS_MPICH else (0.5, "2")
    body = f"""
    if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK")) == 1:
        while not os.path.exists("rank0"):
            time.sleep(0.01)
        time.sleep({pause_s})  # MPI_Init tells nobody how far it has come
        raise ValueError("no data")
    open("rank0", "w").close()
    rc.init()
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_TIMEOUT_S": limit_s})
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "ValueError: no data" in job.output
    if IS_MPICH:  # Open MPI's mpirun ends the job itself
        assert "not all ranks came within 1 s: a rank ended before" in job.output


KILLED = """
    rc.init()
    try:
        for step in range(1_000_000):
            rc.allreduce(X, name="w")
            if rc.rank() == 1 and step == 20:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    except rc.PeerFailedError as error:
        if rc.rank() == 3:
            time.sleep(1)  # within RINGCOMM_GRACE_S; mpirun ends a job half of whose ranks exit
        open(f"saved.{rc.rank()}", "w").write(f"{error.rank}")
        raise
    """


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A job of 4 ranks, of which rank 1 is killed in the midst of its calls."""
    folder = tmp_path_factory.mktemp("killed")
    env = {"RINGCOMM_TIMELINE": str(folder / "trace")}
    return run_script(4, script(KILLED), cwd=folder, options=ULFM, env=env), folder


@above_mpi
def test_a_caught_peer_failure_lets_the_survivor_save_its_work(killed):
    job, folder = killed
    assert job.code != 0
    assert [(folder / f"saved.{r}").read_text() for r in (0, 2, 3)] == ["1"] * 3
    assert len(re.findall(r"^x rank 1", job.output, re.MULTILINE)) == 1


@above_mpi
def test_a_killed_rank_leaves_a_timeline_that_can_be_read(killed):
    for rank, missing in enumerate(["", "]"]):
        events = json.loads((killed[1] / f"trace.{rank}.json").read_text() + missing)
        assert sum(event.get("name") == "allreduce[w]" for event in events) > 10
        assert {"negotiation", "shared memory"} <= {event.get("name") for event in events}


@above_mpi
def test_a_rank_that_raises_ends_no_earlier_than_those_that_save_their_work(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        raise ValueError("diverged")
    try:
        rc.allreduce(X)
    except rc.PeerFailedError:
        time.sleep(0.5 * (1 + rc.rank()))  # within RINGCOMM_GRACE_S
        open(f"saved.{rc.rank()}", "w").close()
        raise
    """
    job = run_script(3, script(body), cwd=tmp_path)
    assert job.code != 0
    assert {each.name for each in tmp_path.glob("saved.*")} == {"saved.0", "saved.2"}
    assert "rank 1" in report_of(job.output)
    assert "ValueError: diverged" in report_of(job.output)


def test_a_stopped_rank_is_a_timeout_that_names_it_and_it_does_not_outlive_the_job(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    rc.allreduce(X, name="w")
    """
    job = run_script(2, script(body), cwd=tmp_path, env=LATE)
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    late = r"CommTimeoutError: allreduce\[w\]: rank 0 has waited .*for rank 1, which did not answer"
    assert re.search(late, job.output), job.output
    assert "raised CommTimeoutError" in report_of(job.output)


# The launcher ends its ranks in one way, whichever it gets.
ASKING = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", at_length(ASKING, ASKING[IS_MPICH:][:1]))
def test_ctrl_c_ends_a_job_promptly(number, tmp_path):
    body = """
    rc.init()
    rc.barrier()
    open(f"ready.{rc.rank()}", "w").close()
    while True:
        rc.allreduce(X)
    """
    (tmp_path / "script.py").write_text(script(body))
    process = start_job(2, tmp_path / "script.py", cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
    process.send_signal(number)
    job = finish_job(process, timeout_s=HANG_S)
    assert job.seconds < PROMPTLY_S
    assert job.code != 0
    assert "x rank" not in job.output  # nobody's fault


def test_a_launcher_that_is_killed_leaves_no_rank_behind(tmp_path):
    body = """
    rc.init()
    rc.barrier()
    open(f"ready.{rc.rank()}.{os.getpid()}", "w").close()
    while True:
        rc.allreduce(X)
    """
    (tmp_path / "script.py").write_text(script(body))
    process = start_job(2, tmp_path / "script.py", cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("ready.*"))) == 2)
    pids = [int(path.name.split(".")[2]) for path in tmp_path.glob("ready.*")]
    process.kill()
    finish_job(process, timeout_s=HANG_S)
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def wait_for(condition):
    wait_until(condition, "waited in vain", PROMPTLY_S)


@above_mpi
def test_what_a_lost_rank_has_started_does_not_keep_the_job(tmp_path):
    body = """
    rc.init()
    if rc.rank() == 1:
        import ctypes
        subprocess.Popen(["sleep", "60"])
        if os.fork() == 0:
            time.sleep(60)
        ctypes.CDLL(None)._exit(0)
    rc.allreduce(X, name="w")
    """
    job = run_script(2, script(body), cwd=tmp_path, timeout_s=HANG_S)
    assert job.code != 0, job.output
    assert "x rank 1" in report_of(job.output)


def test_a_rank_that_never_calls_init_is_noticed_in_time(tmp_path):
    body = """
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        time.sleep(30)  # "never": the job must end long before
    rc.init()
    """
    job = run_script(2, script(body), cwd=tmp_path, env={"RINGCOMM_TIMEOUT_S": "1"})
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "not all ranks came within 1 s" in job.output


RAISES = """
    import logging
    import multiprocessing
    logging.basicConfig()
    from mpi4py import MPI
    if __name__ == "__main__":
        rc.init()
        sys.excepthook = lambda kind, error, trace: print("my own hook:", error, file=sys.stderr)
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=time.sleep, args=(60,), daemon=True)
        child.start()
        open(f"child.{child.pid}", "w").close()
        rc.barrier()
        if rc.rank() == 1:
            raise ValueError("boom")
        rc.allreduce(X)
    """


@pytest.fixture(scope="module")
def raises(tmp_path_factory):
    """A job of 2 ranks, of which one raises; MPI was imported first."""
    folder = tmp_path_factory.mktemp("raises")
    return run_script(2, script(RAISES), cwd=folder, options=CONTINUOUS), folder


@above_mpi
def test_neither_mpi_imported_first_nor_an_excepthook_of_ones_own_hides_an_error(raises):
    job, _ = raises
    assert job.code != 0
    assert job.seconds < PROMPTLY_S
    assert "my own hook: boom" in job.output
    assert re.search(r"x rank 1 .* raised ValueError - exit 1", report_of(job.output))
    assert "came too late" not in job.output  # nothing did, on one host


@above_mpi
def test_daemon_workers_of_a_failing_rank_end_with_it(raises):
    """Exit handlers of others still run: multiprocessing's ends its daemonic children."""
    pids = [int(path.name.split(".")[1]) for path in raises[1].glob("child.*")]
    assert len(pids) == 2
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def test_a_launcher_of_another_kind_is_refused(tmp_path):
    done = run_command(
        [sys.executable, "-c", script("rc.init()")],
        cwd=tmp_path,
        env=job_environment({"SLURM_STEP_NUM_TASKS": "4"}),
    )
    assert done.returncode == 1
    assert "SLURM_STEP_NUM_TASKS says that 4 processes were launched" in done.stderr


@above_mpi
def test_a_process_alone_needs_no_launcher_but_ranks_of_torchrun_are_refused(tmp_path):
    """Each would be rank 0 of 1; but a rank of MPI that has torch's variables is none of these.

    What a rank's child is told is the same.
    """
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    body = """
        import os, subprocess
        if "WORLD_SIZE" not in os.environ:
            rc.init()
            assert (rc.size(), rc.allreduce(X)[0]) == (1, 1.0)
            os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
            child = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
            assert "is a child of the rank" in child.stderr, child.stderr
            rc.shutdown()
            print("told")
        rc.init()
    """
    path = tmp_path / "script.py"
    path.write_text(script(body))
    hint = f"for MPI it is rank 0 of 1. Run instead: ringcomm run -np 2 {path} (or mpirun"
    for extra, told in (ranks, f"but torchrun started this process: {hint}"), ({}, "told"):
        done = run_command([sys.executable, path], cwd=tmp_path, env=job_environment(extra))
        assert told in done.stderr + done.stdout
        assert done.returncode == int(bool(extra))


# --- jobs in which nothing fails, in many steps each --------------------------------------------
GOOD = """
import multiprocessing

LONG = np.arange(1 << 17)

def mpi_first():
    from mpi4py import MPI
    rc.init()
    assert rc.allreduce(X)[0] == MPI.COMM_WORLD.size

def try_everything(queue):
    texts = []
    for call in (rc.init, rc.barrier, rc.rank, lambda: rc.allreduce(X)):
        try:
            call()
            texts.append("no error")
        except rc.NotInitializedError as error:
            texts.append(str(error))
        except Exception as error:
            texts.append(repr(error))
    queue.put(texts)
    sys.exit(5)

def children():
    rc.init()
    for method in ("fork", "spawn")[: 2 - rc.rank()]:  # a new Python takes a moment
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=try_everything, args=(queue,))
        child.start()
        texts = queue.get(timeout=120)
        child.join(30)
        assert child.exitcode == 5, child.exitcode
        assert "is a child of" in texts[0], (method, texts)
        assert "is a child of" in texts[1] or "call ringcomm.init()" in texts[1], texts
        assert "no error" not in texts[3], (method, texts)
    rc.allreduce(X)
    if rc.rank() == 0:
        done = subprocess.run(
            [sys.executable, "-c", "import ringcomm; print('ok'); ringcomm.init()"],
            capture_output=True, text=True, timeout=60,
        )
        assert done.stdout == "ok\\n" and "is a child of the rank" in done.stderr, done
    for deed in (lambda: 1 / 0, lambda: sys.exit(4), lambda: os._exit(0)):
        pid = os.fork()
        if pid == 0:
            deed()
        os.waitpid(pid, 0)
        rc.allreduce(X)
    assert rc.allreduce(X)[0] == rc.size()

def job_of_its_own():
    if rc.rank() == 0:
        mpirun = [os.path.join(os.path.dirname(sys.executable), "mpirun"), "--oversubscribe"]
        inner = "import numpy as np, ringcomm as rc; rc.init(); print(rc.allreduce(np.ones(3)))"
        inner = [*mpirun, "-np", "2", sys.executable, "-P", "-c", inner]
        done = subprocess.run(inner, capture_output=True, text=True, timeout=120)
        assert done.stdout.count("[2. 2. 2.]") == 2, done
    rc.barrier()

def lives():
    rc.shutdown()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        rc.init(); rc.barrier(); rc.shutdown()
    assert len(os.listdir("/proc/self/fd")) <= before, (before, os.listdir("/proc/self/fd"))
    rc.init()
    rc.allreduce(X)
    rc.shutdown()
    rc.shutdown()

def stopped():
    pids = " ".join(map(str, rc.allgather_object(os.getpid())))
    if rc.rank() == 0:
        stop = f"sleep 0.3; kill -STOP {pids}; sleep 6; kill -CONT {pids}"
        subprocess.Popen(["sh", "-c", stop], start_new_session=True)
        time.sleep(1.0)  # the others wait for it when all are stopped
        rc.send(LONG, 2)
    if rc.rank() == 2:  # rank 1 is in the allreduce
        out = np.zeros_like(LONG)
        assert rc.recv(out) == 0 and (out == LONG).all()
    assert rc.allreduce(X)[0] == rc.size() == 3

def ends_apart():
    if rc.rank() == 1:
        try:
            sys.exit(3)
        except SystemExit:
            pass
    rc.barrier()
    if rc.rank() == 0:
        time.sleep(5)  # e.g. a last evaluation; longer than all limits of the job

if __name__ == "__main__":
    for name in sys.argv[1:]:
        globals()[name]()
        os.write(1, f"{name} is fine\\n".encode())
"""


@pytest.fixture(scope="module")
def good_jobs(tmp_path_factory):
    """The ends of two jobs that run side by side."""
    steps = [(2, ["mpi_first", "lives"], {})]
    if not IS_MPICH:  # which above MPI shows nothing else
        limits = {"RINGCOMM_TIMEOUT_S": "4", "RINGCOMM_GRACE_S": "0.5"}
        steps = [
            (2, ["children", "job_of_its_own", "lives"], {}),
            (3, ["mpi_first", "stopped", "ends_apart"], limits),
        ]
    path = tmp_path_factory.mktemp("good") / "script.py"
    path.write_text(PRELUDE + GOOD)
    jobs = [start_job(n, path, *names, cwd=path.parent, env=env) for n, names, env in steps]
    return [finish_job(job) for job in jobs]


@above_mpi
def test_two_jobs_side_by_side_do_not_meet_and_no_failure_is_told(good_jobs):
    for job in good_jobs:
        assert (job.code, "x rank" in job.output) == (0, False), job


def test_mpi_imported_first_ends_in_order(good_jobs):
    job = good_jobs[-1]
    assert (job.code, "mpi_first is fine" in job.output) == (0, True), job


def test_shutdown_before_the_end_is_in_order_and_leaks_no_descriptor(good_jobs):
    job = good_jobs[0]
    assert (job.code, job.output.count("lives is fine")) == (0, 2), job


@above_mpi
def test_children_are_no_ranks_and_disturb_nobody_however_they_end(good_jobs):
    assert good_jobs[0].output.count("children is fine") == 2, good_jobs[0]


@above_mpi
def test_a_rank_may_start_a_job_of_its_own(good_jobs):
    assert good_jobs[0].output.count("job_of_its_own is fine") == 2, good_jobs[0]


@above_mpi
def test_a_job_that_is_stopped_for_longer_than_its_deadline_goes_on(good_jobs):
    assert good_jobs[1].output.count("stopped is fine") == 3, good_jobs[1]


@above_mpi
def test_ranks_may_end_at_different_times_and_a_caught_sys_exit_is_no_failure(good_jobs):
    job = good_jobs[1]
    assert (job.code, job.output.count("ends_apart is fine")) == (0, 3), job
    assert all(line.endswith(" is fine") for line in job.output.splitlines()), job
