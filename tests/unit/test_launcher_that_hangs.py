"""`ringcomm run` ends a launcher that hangs after all ranks, and no launcher that may have work.

It says which ranks a launcher has not started. No launcher, and no rank, outlives it.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from harness import HANG_S, wait_until

from ringcomm.launch.job import supervisor
from ringcomm.launch.job.processes import local_ranks, stalls
from ringcomm.launch.job.records import Evidence, RankEnd, RecordedFailure
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.supervisor import Supervisor
from ringcomm.launch.job.verdict import JobEnding, judge_ending
from ringcomm.launched import rank_program

# Starts two ranks, and does what is asked when they have ended.
LAUNCHER = f"""
import os, signal, subprocess, sys, time
folder, program, then = sys.argv[1:]
start = [sys.executable, "-I", "-S", {rank_program.__file__!r}, folder, "sh", "-c", program]
ranks = [subprocess.Popen(start, env={{**os.environ, "RANK": str(rank)}}) for rank in range(2)]
codes = [rank.wait() for rank in ranks]
exec(then)
sys.exit(max(codes))
"""
HANGS = "time.sleep(600)"  # until it is ended
WORKS_ON = "time.sleep(2)"  # three times as long as the patience
ENDS_WELL = r'printf "began\nleft\nexit 000\n" >"${RINGCOMM_RUN_FOLDER#* }/rank-$RANK.end"'
# As of a rank that a script starts, and that has ended.
IS_GONE = 'echo "$((1 << 30)) $(uname -n) 1" >"${RINGCOMM_RUN_FOLDER#* }/rank-$RANK.at"'

SAYS = "   Process name: [prterun-vm-25016@1,1]\n   Exit code:    14\n"


@pytest.fixture(autouse=True)
def no_long_patience(monkeypatch):
    monkeypatch.setattr(stalls, "_LOOK_S", 0.05)
    monkeypatch.setattr(stalls, "_LEAST_S", 0.7)


def ending_of(tmp_path, program, then, *, size=2, forks_ranks=True):
    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    argv = [sys.executable, "-c", LAUNCHER, str(folder.path), program, then]
    job = Supervisor(argv, os.environ, folder, size=size, grace_s=0.1, forks_ranks=forks_ranks)
    return job.run()


@pytest.mark.parametrize(
    ("program", "then", "expected"),
    [
        (ENDS_WELL, HANGS, (signal.SIGTERM, 0)),
        (ENDS_WELL, "signal.signal(15, signal.SIG_IGN); " + HANGS, (signal.SIGKILL, 0)),
        (ENDS_WELL.replace("000", "00$RANK"), HANGS, (signal.SIGTERM, 1)),
        ("true", HANGS, (signal.SIGTERM, 1)),  # nobody knows
    ],
)
def test_it_is_ended_and_what_the_ranks_recorded_counts(program, then, expected, tmp_path, capfd):
    ending = ending_of(tmp_path, program, then)
    assert ending.has_hung
    assert (-ending.launcher_code, judge_ending(ending).code) == expected
    assert "all ranks have ended, and the launcher hangs" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("program", "then", "others"),
    [
        ("true", WORKS_ON, {"size": 3}),  # a rank has not been seen here: it may be elsewhere
        ("true", WORKS_ON, {"forks_ranks": False}),
        (f"{IS_GONE}; sleep 2", "", {}),  # a script that works on after its rank
        (f"{IS_GONE}; setsid -w sleep 2", "", {}),
        ("sleep 2 &", WORKS_ON, {}),  # left behind in its session
        ("true", "subprocess.run(['setsid', 'sleep', '2'])", {}),  # as a proxy of MPICH
    ],
)
def test_one_that_may_have_work_is_left_alone(program, then, others, tmp_path):
    ending = ending_of(tmp_path, program, then, **others)
    assert (ending.launcher_code, ending.has_hung) == (0, False)


def test_a_halt_of_the_host_is_no_hang_of_the_launcher(tmp_path, monkeypatch):
    (tmp_path / "rank-0.at").write_text(f"{1 << 30} {os.uname().nodename} 1\n")
    now = [0.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now[0])
    hung = stalls.Hung(RunFolder(tmp_path), 1, 1.0)
    for now[0] in (1.0, 1000.0):
        assert not hung.look(1 << 30)
    assert not hung.is_found


@pytest.mark.parametrize(
    ("ends", "failures", "says", "expected"),
    [
        ([RankEnd(True, 0), RankEnd(True)], [], "", (1, 1)),  # os._exit(), with what code?
        ([RankEnd(True, 0), None], [], "", (1, 1)),
        ([RankEnd(), RankEnd(False, 1)], [(0, 0, Evidence.SILENT)], "", (137, 0)),
        ([RankEnd(False, 75), RankEnd(True, 0)], [], "", (75, 0)),
        ([None, None], [], "", (1, None)),
        ([None, None], [], SAYS, (14, 1)),  # in init(), for want of a thread
    ],
)
def test_the_launchers_code_does_not_count(ends, failures, says, expected):
    verdict = judge_ending(
        JobEnding(
            size=2,
            ends={rank: end for rank, end in enumerate(ends) if end is not None},
            seen=range(2),
            failures=tuple(RecordedFailure(r, c, how, 0, "") for r, c, how in failures),
            launcher_code=0,
            launcher_text=says,
            has_hung=True,
        )
    )
    assert (verdict.code, verdict.rank) == expected


# --- ranks that do not start --------------------------------------------------------------------
def starting(folder, *ranks, then="sleep 600"):
    """Return a launcher that starts these ranks alone."""
    start = f"{sys.executable} -I -S {rank_program.__file__} {folder.path} true"
    return ["sh", "-c", "".join(f"RANK={rank} {start}; " for rank in ranks) + then]


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("kill -STOP $$", r"sh \(pid (\d+)\) is stopped, and goes on after kill -CONT \1\. "),
        ("sleep 600; :", r"sh \(pid \d+\) has below it sleep \(pid \d+\)\. "),
    ],
)
def test_ranks_that_do_not_start_are_named_and_ctrl_c_ends_the_job(
    then, says, tmp_path, monkeypatch
):
    named = r"1 of 3 ranks have started; missing: 0, 2; none is on h2; "
    looks_for = f"{named}{says}Ctrl-C ends the job"
    said = []

    def hear(text):  # the launcher may not be so far when it speaks first
        said.append(text)
        if re.search(looks_for, text):
            os.kill(os.getpid(), signal.SIGINT)

    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    monkeypatch.setattr(stalls, "_UNSEEN_S", 0.1)
    monkeypatch.setattr(supervisor, "say", hear)
    monkeypatch.setattr(supervisor, "_TERM_TO_KILL_S", 0.2)
    here = os.uname().nodename
    job = Supervisor(
        starting(folder, 1, then=then), os.environ, folder, size=3, grace_s=0.1,
        hosts=[f"{here}.a.net", "h2"],
    )  # fmt: skip
    ending = job.run()
    assert sum(re.search(looks_for, text) is not None for text in said) == 1
    assert (ending.asked, judge_ending(ending).code) == (signal.SIGINT, 130)


def seen_by(folder, now, *, size=2, hosts=(), blind=()):
    """Return at which of these times something is said."""
    unseen = stalls.Unseen(folder, size, hosts, "mpirun")
    said = []
    for now[0] in map(float, range(250)):
        if unseen.look(1 << 30, blind):
            said.append(now[0])
    return said


def test_it_is_said_seldom_which_ranks_are_missing_and_not_once_they_are_there(
    tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(stalls.time, "monotonic", lambda: now[0])
    folder = RunFolder(tmp_path)
    (tmp_path / "rank-0.at").write_text("9 h1.a.net 1\n")
    assert seen_by(folder, now) == [30.0, 60.0, 120.0, 240.0]
    hosts = ("h1", "h2")
    now[0] = 0.0
    assert seen_by(folder, now, hosts=hosts)
    now[0] = 0.0
    assert seen_by(folder, now, hosts=hosts, blind=("h2",)) == []  # its ranks cannot be seen
    (tmp_path / "rank-1.at").write_text("9 h2 1\n")
    now[0] = 0.0
    assert seen_by(folder, now, hosts=hosts) == []


# --- `ringcomm run` is killed -------------------------------------------------------------------
SUPERVISES = """
import os, sys
from pathlib import Path
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.supervisor import Supervisor
folder = RunFolder(Path(sys.argv[1]))
folder.create({}, {})
Supervisor(sys.argv[2:], os.environ, folder, size=1, grace_s=1).run()
"""


@pytest.mark.parametrize(
    "deed",
    [
        "sleep 600; :",  # a script that calls the true launcher, as Intel MPI's mpirun does
        "kill -STOP $$",
        "trap '' TERM; sleep 600; :",
        f"RANK=0 setsid {sys.executable} -I -S {rank_program.__file__} $0 sleep 600; :",
    ],
)
def test_no_launcher_and_no_rank_outlives_it(deed, tmp_path):
    folder = tmp_path / "run"
    script = tmp_path / "mpirun"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/begins\n{deed.replace('$0', str(folder))}\n")
    script.chmod(0o755)
    environ = {**os.environ, "MARK": str(tmp_path)}
    command = [sys.executable, "-P", "-c", SUPERVISES, str(folder), str(script)]
    run = subprocess.Popen(command, env=environ)
    is_rank = "setsid" in deed
    begins = folder / "rank-0.at" if is_rank else tmp_path / "begins"
    wait_until(lambda: begins.exists() or run.poll() is not None, "it does not begin")
    wait_until(lambda: len(marked(tmp_path)) >= 3, "there is no watchdog")
    run.kill()
    run.wait()
    wait_until(lambda: marked(tmp_path) == [], lambda: marked(tmp_path))


# Takes a file as an MPI library does in init(), and leaves it if it is killed.
IN_INIT = """
import mmap, pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(sys.argv[2], "w+b") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
pathlib.Path(sys.argv[1], "rank-0.starts").touch()
time.sleep(600)
"""


@pytest.fixture
def segment():
    path = Path(f"/dev/shm/Intel_MPI_{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize(("deed", "code"), [("INT", 0), ("KILL", -9)])
def test_no_file_of_mpi_outlives_ranks_that_are_killed_in_init(deed, code, segment, tmp_path):
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "rank.py").write_text(IN_INIT)
    launcher = (
        f"RANK=0 {sys.executable} -I -S {rank_program.__file__} {folder.path} "
        f"{sys.executable} {tmp_path}/rank.py {folder.path} {segment} & "
        f"until [ -e {folder.path}/rank-0.starts ]; do sleep 0.01; done; kill -{deed} $PPID; wait"
    )
    command = [sys.executable, "-P", "-c", SUPERVISES, str(folder.path), "sh", "-c", launcher]
    environ = {**os.environ, "MARK": str(tmp_path)}
    done = subprocess.run(command, env=environ, check=False, timeout=HANG_S)
    assert folder.in_init() == {0}
    assert done.returncode == code
    wait_until(lambda: marked(tmp_path) == [], lambda: marked(tmp_path))
    assert not segment.exists()


def test_a_file_of_mpi_is_known_once_its_rank_waits_in_init(segment, tmp_path):
    folder, rank = RunFolder(tmp_path / "run"), tmp_path / "rank.py"
    folder.create({}, {})
    rank.write_text(IN_INIT)
    start = [sys.executable, "-I", "-S", rank_program.__file__, str(folder.path)]
    files = local_ranks.MpiFiles(folder, 2)
    files.look()  # at all ranks; and in a second again
    process = subprocess.Popen(
        [*start, sys.executable, str(rank), str(folder.path), str(segment)],
        env={**os.environ, "RANK": "0"},
    )
    wait_until(lambda: folder.in_init() == {0}, "it does not begin")
    files._look_at = 0.0
    files.look()
    process.kill()
    process.wait()
    assert segment.exists()
    files.remove()
    assert not segment.exists()


def marked(folder):
    """Return the processes that have the folder in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={folder}".encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_text())
        except OSError:  # it has ended
            continue
    return found
