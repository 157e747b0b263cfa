"""`ringcomm run` with real jobs: their output, their exit codes, signals, and what is left."""

import json
import os
import re
import signal
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import (
    BIN,
    HANG_S,
    IS_MPICH,
    above_mpi,
    at_length,
    job_environment,
    run_command,
    wait_until,
)

from ringcomm.launch.cli import main

RUN_PAGE = Path(__file__).parents[2] / "docs" / "run.md"
PRELUDE = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc
def here():  # the tests wait for it
    open(f"{os.environ['RANK']}.here", "w").close()
"""


@dataclass
class Run:
    code: int
    out: str
    err: str
    folder: Path

    @property
    def end(self):
        return json.loads((self.folder / "end.json").read_text())

    def log(self, rank):
        return (self.folder / f"rank-{rank}.log").read_text()


class Started:
    """A `ringcomm run` that runs."""

    def __init__(self, cwd, *arguments, env=None, output=subprocess.PIPE):
        self.cwd = Path(cwd)
        self.process = subprocess.Popen(
            # Who runs these tests in the background ignores the first two, and so would the job.
            [
                "env",
                "--default-signal=INT,HUP",
                BIN / "ringcomm",
                "run",
                "--run-folder",
                "run",
                *map(str, arguments),
            ],
            cwd=cwd,
            env=job_environment({"TMPDIR": str(cwd)} | (env or {})),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            preexec_fn=heed_signals,  # noqa: PLW1509 - no threads here
        )

    def wait_for(self, n):
        """Return once so many ranks have called here()."""
        wait_until(
            lambda: len(list(self.cwd.glob("*.here"))) == n or self.process.poll() is not None,
            "not all ranks are there",
        )
        assert self.process.poll() is None, self.process.communicate()

    def finish(self):
        try:
            out, err = self.process.communicate(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.process.communicate()}") from None
        return Run(self.process.returncode, out, err, self.cwd / "run")


def heed_signals():
    """Undo what a shell does to its background jobs, which ignore Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def script(cwd, body):
    path = Path(cwd) / "train.py"
    path.write_text(PRELUDE + textwrap.dedent(body))
    return path


def run(cwd, n, body, *options, env=None):
    return Started(cwd, "-np", n, *options, script(cwd, body), env=env).finish()


def processes_of(folder):
    """Return the processes that know this folder: ranks, their children, mpirun."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            text = path.read_bytes() + (path.parent / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if str(folder).encode() in text and int(path.parent.name) != os.getpid():
            found.append((path.parent.name, (path.parent / "cmdline").read_text()))
    return found


# --- a job that completes -----------------------------------------------------------------------
ODD_ARGUMENTS = [
    *("a", ":", "::", "\\:", "--", "--", "", "two words", "new\nline", "größe", '"', "$HOME", "*"),
    *("%3A", "-np", "3", "-x", "A=1", "--mca", "@file", "|", "&", "{}", "%s", ":"),
]
NOTES_ARGUMENTS = """
import json
with open(f"{os.environ['RANK']}.json", "w") as file:
    json.dump(sys.argv[1:], file)
"""
COMPLETES = f"""
{NOTES_ARGUMENTS}
rc.init()
total = int(rc.allreduce(np.ones(1))[0])
print("total", total, len(sys.argv), flush=True)
print("warned", file=sys.stderr)
names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS")
print([os.environ[name] for name in names], int(os.environ["MASTER_PORT"]) > 0)
sessions = os.environ.get("PMIX_SERVER_TMPDIR", "ringcomm-mpi-")  # of Open MPI
print("private", "ringcomm-mpi-" in sessions, flush=True)
print(os.environ["LOCAL_RANK"] == str(rc.local_rank()), flush=True)

import threading
def write():  # as that of TensorBoard's writers
    with open("/dev/full", "w") as file:
        file.write("events")
thread = threading.Thread(target=write, daemon=True)
thread.start()
thread.join()
print("after", float(rc.allreduce(np.ones(1))[0]), flush=True)
"""


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """A job of 2 ranks that completes."""
    folder = tmp_path_factory.mktemp("completed")
    return Started(folder, "-np", 2, script(folder, COMPLETES), *ODD_ARGUMENTS).finish()


def test_a_job_leaves_its_configuration_its_logs_and_the_record_of_its_end(completed):
    job, n_words = completed, 1 + len(ODD_ARGUMENTS)
    assert job.code == 0, job
    assert sorted(line for line in job.out.splitlines() if "total" in line) == [
        f"[{rank}] total 2 {n_words}" for rank in range(2)
    ]
    for rank in range(2):
        lines = job.log(rank).splitlines()
        assert lines[:2] == [f"total 2 {n_words}", "warned"]
        assert lines[2] == f"['{rank}', '2', '2', '127.0.0.1', '1'] True"
        assert lines[3:5] == ["private True", "True"]
    config = json.loads((job.folder / "run.json").read_text())
    assert config["program"][1:] == [str(job.folder.parent / "train.py"), *ODD_ARGUMENTS]
    assert (config["ranks"], config["roles"]) == (2, {"worker": 2})
    assert ("MPICH" if IS_MPICH else "Open MPI") in config["versions"]["mpi"]
    assert job.end["code"] == 0
    assert job.end["exit_codes"] == {"0": 0, "1": 0}
    assert "x rank" not in job.err
    assert re.search(r"\nringcomm run: completed in \d+(\.\d)? s, run\n\Z", job.err), job.err
    assert "\r" not in job.err  # there is no terminal
    told = {shape(name) for name in re.findall(r"`([\w.-]+)`", RUN_PAGE.read_text())}
    assert {shape(path.name) for path in job.folder.iterdir()} - told == set()


def shape(name):
    """Return the name of a file without the number of a rank."""
    return re.sub(r"\d+", "N", name)


def test_the_arguments_of_a_script_pass_as_they_are(completed):
    for rank in range(2):
        text = (completed.folder.parent / f"{rank}.json").read_text()
        assert json.loads(text) == ODD_ARGUMENTS


def test_a_daemon_thread_that_a_full_disk_ends_ends_no_rank(completed):
    assert completed.code == 0, completed
    assert completed.out.count("after 2.0") == 2, completed
    assert "No space left on device" in completed.out


OF_TWO = f"""
{NOTES_ARGUMENTS}
from mpi4py import MPI
world = MPI.COMM_WORLD
members = world.Split(0 if world.rank < 2 else MPI.UNDEFINED)
if world.rank < 2:
    rc.init(members)
    print(rc.allreduce(np.ones(1)))
"""


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """A job of a module on 3 ranks, of which init() gets two."""
    folder = tmp_path_factory.mktemp("of_two")
    module = script(folder, OF_TWO).stem
    return Started(folder, "-np", 3, "-m", module, *ODD_ARGUMENTS).finish()


@above_mpi
def test_the_arguments_of_a_module_pass_as_they_are(of_two):
    for rank in range(3):
        assert json.loads((of_two.folder.parent / f"{rank}.json").read_text()) == ODD_ARGUMENTS


@above_mpi
def test_ranks_that_are_not_among_those_of_init_end_well(of_two):
    assert of_two.code == 0, of_two
    assert of_two.out.count("[2.]") == 2, of_two


@above_mpi
def test_paths_and_names_of_any_bytes_are_no_fault_in_an_ascii_locale(tmp_path):
    folder = tmp_path / os.fsdecode(b"gr\xc3\xb6\xdfe \xff")
    folder.mkdir()
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    body = """
    rc.init()
    rc.allreduce(np.ones(1), name="h\xf6he")
    print(len(sys.argv[1]), flush=True)
    rc.barrier()
    if rc.rank() == 1:
        raise ValueError("gr\xf6\xdfe")
    rc.barrier()
    """
    job = Started(folder, "-np", 2, script(folder, body), "\xf6\xfc", env=locale).finish()
    assert job.code == 1, job
    assert job.end["rank"] == 1
    assert "x rank 1 " in job.err
    assert "raised ValueError" in job.err
    assert "Decode" not in job.out + job.err + job.log(0) + job.log(1)


def test_a_program_that_knows_nothing_of_ringcomm_runs_and_stdin_is_left_to_the_caller(tmp_path):
    # All of stdin is left to the caller. MPICH gives the other ranks a pipe that never ends.
    command = "[ $RANK = 1 ] || cat; echo $RANK; exit $RANK"
    run = f"{BIN}/ringcomm run --run-folder run -np 2 -- sh -c '{command}'; echo $?; cat"
    done = run_command(
        ["sh", "-c", run],
        cwd=tmp_path,
        env=job_environment({"TMPDIR": str(tmp_path)}),
        input="words",
    )
    *ranks, code, rest = done.stdout.splitlines()
    assert (sorted(ranks), code, rest) == (["[0] 0", "[1] 1"], "1", "words"), done
    assert "x " in done.stderr


@pytest.mark.at_length  # a plan, which tests/unit shows
def test_one_rank_has_no_prefix_and_its_own_exit_code(tmp_path):
    job = run(tmp_path, 1, "rc.init(); print('alone', flush=True); sys.exit(5)")
    assert (job.code, job.out) == (5, "alone\n")
    assert job.err.splitlines()[-2:] == ["x rank 0 failed - exit 5", "  logs: run/rank-0.log"]


@pytest.fixture
def no_launcher(tmp_path, monkeypatch):
    """Let ringcomm's commands be called in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ.keys() - job_environment().keys():
        monkeypatch.delenv(name)


@above_mpi
def test_dry_run_prints_a_command_and_makes_nothing(no_launcher, tmp_path, capsys):
    options = ["--dry-run", "--run-folder", "run", "-np", "2"]
    assert main(["run", *options, "train.py"]) == 0
    assert re.search(rf"{BIN}/mpirun .*-np 2 .*train\.py", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == []


@above_mpi
def test_a_command_whose_reader_has_gone_ends_without_a_traceback(tmp_path):
    command = [BIN / "ringcomm", "run", "--dry-run", "-np", "2", "train.py"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env=job_environment(), check=False,
    )  # fmt: skip
    os.close(writer)
    assert (done.returncode, "Error" in done.stderr) == (141, False), done.stderr


def test_a_refusal_has_code_2_and_one_line(no_launcher, monkeypatch, capsys):
    assert main(["run", "-np", "2", "-H", "h1:1", "train.py"]) == 2
    refused = capsys.readouterr().err
    assert re.fullmatch(r"ringcomm run: the hosts .* 1 places .* 2 ranks.*\n", refused)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(["run", "-np", "1", "x"]) == 2
    assert "a rank of a job already" in capsys.readouterr().err


@above_mpi
def test_servers_and_an_evaluator_are_added_to_the_workers(tmp_path):
    body = """
    import ringcomm.ps as ps
    @ps.evaluator(every=1)
    def evaluate(step):
        ps.report(step, loss=1.0)
    ps.init()
    print("worker", rc.rank(), "of", rc.size(), flush=True)
    """
    job = run(tmp_path, 1, body, "--servers", "1", "--evaluators", "1")
    assert job.code == 0, job
    assert "3 ranks (1 worker, 1 server, 1 evaluator)" in job.err
    assert job.out.splitlines() == ["[0] worker 0 of 1"]


@above_mpi
@pytest.mark.at_length  # it sets RINGCOMM_TIMELINE, no more
def test_each_rank_records_a_timeline(tmp_path):
    job = run(tmp_path, 2, "rc.init(); rc.allreduce(np.ones(3), name='w')", "--timeline")
    assert job.code == 0, job
    for rank in range(2):
        assert "w" in (job.folder / f"timeline.{rank}.json").read_text()


# --- jobs that fail -----------------------------------------------------------------------------
ENDS = {
    "raises": ("raise ValueError('boom')", 1, "raised ValueError"),
    "raises in a thread": (
        "__import__('threading').Thread(target=lambda: 1 / 0).start(); time.sleep(60)",
        1,
        "raised ZeroDivisionError",
    ),
    "exits": ("sys.exit(3)", 3, "called sys.exit - exit 3"),
    "exits at once": ("os._exit(0)", 1, r"called os._exit\(0\)"),
    "aborts": (
        "from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)",
        7,
        r"called MPI_Abort\(7\)\n    File .*train.py",
    ),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
    "crashes": ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "died of SIGSEGV"),
    "leaves": ("sys.exit(0)", 1, "left the job while others waited"),
}
ENDS_IN_GATE = ["is killed"] if IS_MPICH else ["aborts", "is killed", "leaves"]


@pytest.mark.parametrize("end", at_length(ENDS, ENDS_IN_GATE))
def test_the_exit_code_is_that_of_the_rank_that_failed_first(end, tmp_path):
    act, code, words = ENDS[end]
    body = f"""
    rc.init()
    rc.barrier()
    if rc.rank() == 1:
        time.sleep(0.5)  # the other one waits by then
        {act}
    rc.allreduce(np.ones(3), name="w")
    """
    job = run(tmp_path, 2, body)
    assert (job.code, job.end["code"], job.end["rank"]) == (code, code, 1), job
    last = job.err.split("\n\nx ")[-1]
    assert re.match(rf"rank 1 \(host .*\) .*{words}", last), job.err
    waiting = r"  waiting at that moment: rank 0 in allreduce\[w\] \(24 B\) for \d\.\d+ s\n"
    assert re.search(waiting + r"  logs: run/rank-1\.log\n\Z", last), job.err
    assert job.err.count("x rank 1") == 1
    assert "BAD TERMINATION" not in job.err
    assert "prterun" not in job.err
    assert processes_of(job.folder) == []


AFTER_THE_END = f"""
import subprocess
from mpi4py import MPI
from ringcomm.launched.process_stat import ProcessStat

def lives(pid):
    try:
        return not ProcessStat.of(pid).is_dead
    except OSError:
        return False

rc.init()
pids = rc.allgather_object(os.getpid())
rc.shutdown()
MPI.Finalize()  # which may wait for the other one
if os.environ["RANK"] == "0":
    inner = "import ringcomm as rc, sys; rc.init(); rc.barrier(); rc.shutdown(); sys.exit(6)"
    names = ("PMI", "OMPI_COMM", "OMPI_FILE", "PRTE", "HYDI", "MPI_LOCAL")
    environ = {{n: v for n, v in os.environ.items() if not n.startswith(names)}}
    assert "RINGCOMM_RUN_FOLDER" in environ
    job = [{str(BIN / "mpirun")!r}, "-np", "2", sys.executable, "-P", "-c", inner]
    print(subprocess.run(job, env=environ).returncode != 0, flush=True)
    os._exit(0)
while lives(pids[0]):  # else mpirun would end it
    time.sleep(0.01)
sys.exit(4)
"""


@pytest.fixture(scope="module")
def after_the_end(tmp_path_factory):
    """A job of 2 ranks that have shut down: one runs another job and leaves, then one fails."""
    return run(tmp_path_factory.mktemp("after"), 2, AFTER_THE_END)


@above_mpi
def test_a_failure_after_shutdown_counts_although_all_have_left(after_the_end):
    job = after_the_end
    assert (job.code, job.end["rank"], job.end["exit_codes"]["1"]) == (4, 1, 4), job


@above_mpi
def test_os_exit_after_a_proper_end_is_good_and_a_job_of_a_rank_writes_no_records_of_this_run(
    after_the_end,
):
    # Who calls os._exit() records no code of its own.
    assert after_the_end.end["exit_codes"] == {"0": None, "1": 4}, after_the_end
    assert "x rank 0" not in after_the_end.err
    assert "[0] True" in after_the_end.out


def test_mpirun_cannot_start_a_program_that_is_not_there(tmp_path):
    job = Started(tmp_path, "-np", 2, "no-such-program").finish()
    assert job.code == 127
    assert "no-such-program: No such file or directory" in job.out


# --- signals ------------------------------------------------------------------------------------
WAITING = """
rc.init()
rc.barrier()
here()
while True:
    time.sleep(0.1)  # a step takes so long
    rc.allreduce(np.ones(3))
"""
HANDLED = """
stop = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda *_: stop.append(1))
rc.init()
rc.barrier()
here()
while not rc.allreduce(np.array([len(stop)]))[0]:
    time.sleep(0.05)  # a step takes so long
time.sleep(0.7)  # longer than Open MPI's mpirun gives ranks after SIGTERM
open(f"checkpoint.{rc.rank()}", "w").close()
"""


ASKING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", at_length(ASKING, [signal.SIGHUP]))
def test_a_signal_ends_the_job_after_the_grace_period_and_nothing_is_left(number, tmp_path):
    body = """
    if os.environ["RANK"] == "1":
        for number in (1, 2, 15):
            signal.signal(number, signal.SIG_IGN)
    """
    program = script(tmp_path, textwrap.dedent(body) + WAITING)
    job = Started(tmp_path, "-np", 2, "--grace", "0.3", program)
    job.wait_for(2)
    job.process.send_signal(number)
    done = job.finish()
    assert (done.code, done.end["code"]) == (128 + number, 128 + number), done
    assert f"ringcomm run: {number.name}: the ranks have 0.3 s to end" in done.err
    assert processes_of(done.folder) == []


@above_mpi
@pytest.mark.at_length  # as one that a shell script starts, or whose terminal goes away: see below
@pytest.mark.parametrize("number", ASKING)
def test_a_job_that_stops_in_order_after_a_signal_has_code_75(number, tmp_path):
    job = Started(tmp_path, "-np", 2, script(tmp_path, HANDLED))
    job.wait_for(2)
    job.process.send_signal(number)
    done = job.finish()
    assert done.code == 75, done
    assert {path.name for path in tmp_path.glob("checkpoint.*")} == {"checkpoint.0", "checkpoint.1"}
    assert done.err.endswith(
        f"stopped in order after {number.name} - exit 75; start the job again to go on\n"
    )


@above_mpi
@pytest.mark.at_length  # seldom used
def test_a_second_signal_skips_the_grace_period(tmp_path):
    body = "for n in (15, 2): signal.signal(n, signal.SIG_IGN)\n" + WAITING
    job = Started(tmp_path, "-np", 2, "--grace", "1000", script(tmp_path, body))
    job.wait_for(2)
    job.process.send_signal(signal.SIGINT)
    assert "have 1000 s" in next(line for line in job.process.stderr if "SIGINT" in line)
    job.process.send_signal(signal.SIGINT)
    assert job.finish().code == 130


@pytest.mark.at_length  # seldom used
def test_sigusr1_is_the_programs_own(tmp_path):
    body = "signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\n" + WAITING
    body = body.replace("rc.allreduce(np.ones(3))", "pass")
    job = Started(tmp_path, "-np", 2, script(tmp_path, body))
    job.wait_for(2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.finish().code == 0


def test_a_rank_that_a_shell_script_starts_gets_signals_and_is_shown(tmp_path):
    (tmp_path / "rank.sh").write_text('"$@"\ncode=$?\nsleep 0.1\nexit $code\n')
    program = script(tmp_path, HANDLED)
    job = Started(tmp_path, "-np", 2, "sh", "rank.sh", BIN / "python", program)
    job.wait_for(2)
    shown = run_command([BIN / "ringcomm", "top", "run", "--json"], cwd=tmp_path)
    assert [each["rank"] for each in json.loads(shown.stdout)] == [0, 1], shown
    job.process.send_signal(signal.SIGTERM)
    done = job.finish()
    assert done.code == 75, done
    assert {path.name for path in tmp_path.glob("checkpoint.*")} == {"checkpoint.0", "checkpoint.1"}
    assert "ringcomm run: SIGTERM: the ranks have 20 s to end" in done.err
    assert "stopped in order after SIGTERM - exit 75; start the job again to go on\n" in done.err
    assert processes_of(done.folder) == []


@above_mpi
def test_a_shell_script_that_goes_on_after_its_rank_ends_at_a_signal(tmp_path):
    (tmp_path / "rank.sh").write_text('"$@"\ntouch 0.here\nsleep 1000\n')
    program = script(tmp_path, "rc.init()")
    job = Started(tmp_path, "-np", 1, "--grace", "1000", "sh", "rank.sh", BIN / "python", program)
    job.wait_for(1)
    job.process.send_signal(signal.SIGTERM)
    done = job.finish()
    assert done.code == 75, done
    assert processes_of(done.folder) == []


def test_nothing_is_left_when_ringcomm_run_itself_is_killed(tmp_path):
    job = Started(tmp_path, "-np", 2, script(tmp_path, WAITING))
    job.wait_for(2)
    job.process.kill()
    job.process.communicate()
    wait_until(lambda: processes_of(tmp_path / "run") == [], lambda: processes_of(tmp_path / "run"))


@above_mpi
def test_a_job_whose_terminal_goes_away_has_time_to_end_in_order(tmp_path):
    controller, terminal = os.openpty()
    job = Started(tmp_path, "-np", 2, script(tmp_path, HANDLED), output=terminal)
    os.close(terminal)
    job.wait_for(2)
    os.close(controller)
    job.process.send_signal(signal.SIGHUP)
    done = job.finish()
    assert (done.code, done.end["code"]) == (75, 75), done.end
    assert {path.name for path in tmp_path.glob("checkpoint.*")} == {"checkpoint.0", "checkpoint.1"}


@above_mpi
@pytest.mark.at_length  # takes 2 s
def test_the_job_goes_on_when_the_reader_of_its_output_has_gone(tmp_path):
    body = """
    rc.init()
    for i in range(20):
        print("line", i, flush=True)
        time.sleep(0.05)  # the reader goes meanwhile
    """
    job = Started(tmp_path, "-np", 2, script(tmp_path, body))
    assert "line" in job.process.stdout.readline()
    job.process.stdout.close()
    assert job.process.wait(HANG_S) == 0
    job.process.stderr.close()
    assert (tmp_path / "run" / "rank-1.log").read_text().splitlines()[-1] == "line 19"


@pytest.mark.at_length  # 2 ranks with torch take 6 s of a core
@pytest.mark.skipif(IS_MPICH, reason="torch is in the environment of Open MPI")
def test_ddp_over_gloo_finds_the_other_ranks_without_a_change(tmp_path):
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print(dist.get_rank(), dist.get_world_size(), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """
    job = run(tmp_path, 2, body)
    assert job.code == 0, job
    assert sorted(job.out.splitlines()) == ["[0] 0 2", "[1] 1 2"]


SURVIVES = """
state = rc.elastic.ArrayState(step=0, sum=np.zeros(1))

@rc.elastic.run
def train(state):
    while state.step < 20:
        if (rc.elastic.view().members[rc.rank()], state.step) in DEATHS:
            os.kill(os.getpid(), signal.SIGKILL)
        state.sum += rc.allreduce(np.ones(1))
        state.step += 1
        state.commit()
    return rc.size(), float(state.sum[0])

print("ended with", *train(state))
"""


# MPICH's mpiexec ends a job that has lost a rank by a signal; Open MPI's, if it has exited with 3.
@pytest.mark.parametrize(
    ("end", "code", "options"),
    at_length([("sys.exit(3)", 3, ()), ("sys.exit(0)", 1, ())], [("sys.exit(3)", 3, ())])
    if IS_MPICH
    else [
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, ("--elastic", "1:2")),
        ("sys.exit(0)", 1, ()),
    ],
)
def test_a_job_that_loses_a_rank_before_init_does_not_wait_for_it(end, code, options, tmp_path):
    # Rank 0 is killed if it does not end within 3 s, which it may need to start beside others. Open
    # MPI itself ends the job if rank 0 has begun MPI when rank 1 ends.
    body = f"""
    import contextlib, pathlib
    if os.environ["RANK"] == "1":
        while not os.path.exists("rank0"):
            time.sleep(0.01)
        pathlib.Path("pid").write_text(str(os.getpid()))
        os.rename("pid", "rank1")
        {end}
    open("rank0", "w").close()
    while not os.path.exists("rank1"):
        time.sleep(0.01)
    with contextlib.suppress(OSError):
        while pathlib.Path("/proc", pathlib.Path("rank1").read_text(), "exe").resolve(strict=True):
            time.sleep(0.01)
    rc.init()
    """
    done = run(tmp_path, 2, body, *options, env={"RINGCOMM_TIMEOUT_S": "60"})
    assert done.code == code, done
    assert done.out == "[0] ringcomm.init: rank 1 ended before it was through init()\n", done
    assert f"x rank 1 ended before it was through init() - exit {code}" in done.err
    assert "run/rank-1.log" in done.err
    assert processes_of(done.folder) == []


@pytest.mark.skipif(IS_MPICH, reason="Open MPI returns 0 for such a job")
def test_an_elastic_job_of_which_no_rank_comes_to_init_has_failed(tmp_path):
    done = run(tmp_path, 2, 'raise ValueError("a typo")', "--elastic", "1:2")
    assert done.code == 1, done
    assert "no rank has come through ringcomm.init()" in done.err


@pytest.mark.skipif(IS_MPICH, reason="Open MPI alone lets the other ranks live")
def test_an_elastic_job_that_has_lost_too_many_ranks_is_started_again(tmp_path):
    program = script(tmp_path, SURVIVES.replace("DEATHS", "[(1, 7)]"))
    done = Started(tmp_path, "-np", 2, "--elastic", "2:2", "--restarts", "1", program).finish()
    assert done.code == 75, done
    assert done.out.count("1 ranks are left, and RINGCOMM_ELASTIC_MIN is 2; no others") == 2, done
    assert "its ranks have ended in order; it is started again" in done.err
    assert "it is not started again: --restarts is 1" in done.err


DIES = """
rc.init()
PIDS = rc.allgather_object(os.getpid())
state = rc.elastic.ArrayState(step=0, sum=np.zeros(1))
state.keep_in("state", every=3)

@rc.elastic.run
def train(state):
    began = state.step
    while state.step < 20:
        if began == 9 and state.step == 14 and rc.elastic.view().members[rc.rank()] == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.sum += rc.allreduce(np.ones(1))
        state.step += 1
        state.commit()
        if began == 0 and state.step == began + 10 and rc.rank() == 0:  # no rank hears of another
            [os.kill(pid, signal.SIGKILL) for pid in reversed(PIDS)]
    print(f"began at {began}, ended with {rc.size()} {state.sum[0]}", flush=True)

train(state)
"""


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
def test_a_job_whose_ranks_are_all_lost_goes_on_from_the_kept_commit_and_one_more_loss_is_no_end(
    tmp_path,
):
    program = script(tmp_path, DIES)
    done = Started(tmp_path, "-np", 2, "--elastic", "1:2", program).finish()
    assert done.code == 0, done
    assert done.out.count(f"began at 14, ended with 1 {14 * 2 + 6:.1f}") == 1, done
    assert "rank 1" in done.err
    assert done.out.count("goes on from commit 9, ") == 1, done
    assert "1 commit after it is lost" in done.out
    assert "the job has lost all its workers; it is started again" in done.err
    assert done.end["code"] == 137
    again = json.loads((tmp_path / "run-restart-1" / "end.json").read_text())
    assert again["lost"].keys() == {"1"}
    lost = f" s, lost rank 1 ({again['lost']['1']}) on the way, run-restart-1\n"
    assert re.search(rf"\nringcomm run: completed in [\d.]+{re.escape(lost)}\Z", done.err), done.err
    assert again["code"] == 0
    assert processes_of(done.folder) == []


FAILS = """
def end():
    print("ends", flush=True)
    DEED
rc.init()
if WHERE == "before":
    end()
state = rc.elastic.ArrayState(step=0)

@rc.elastic.run
def train(state):
    while state.step < 9:
        rc.barrier()
        if WHERE == "in" and state.step == 4:
            end()
        state.step += 1
        state.commit()

train(state)
end()
"""
DEEDS = {
    "raise": ('raise ValueError("no labels")', 1),
    "sys.exit": ("sys.exit(3)", 3),
    "os._exit": ("os._exit(4)", 4),
    "abort": ("os.abort()", 134),
}
ALL_FAIL = [(deed, where) for deed in DEEDS for where in ("before", "in", "after")]
# What a deed leaves as evidence, and what follows from that, is shown by tests/unit.
ALL_FAIL_IN_GATE = [("raise", "in")]


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
@pytest.mark.parametrize(("deed", "where"), at_length(ALL_FAIL, ALL_FAIL_IN_GATE))
def test_a_program_that_fails_by_itself_is_not_started_again(deed, where, tmp_path):
    deed, code = DEEDS[deed]
    body = FAILS.replace("DEED", deed).replace("WHERE", repr(where))
    done = Started(tmp_path, "-np", 2, "--elastic", "1:2", script(tmp_path, body)).finish()
    assert done.code == code, done
    assert done.out.count("ends") == 2, done
    assert done.err.count("the program has failed by itself, so the job is not started again") == 1
    # The one that fails a moment later than the other is told has a report of its own.
    told = re.findall(r"^(?:x|  likewise:) rank (\d)", done.err, re.MULTILINE)
    assert sorted(told) == ["0", "1"], done
    assert not (tmp_path / "run-restart-1").exists()


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
def test_an_elastic_job_below_its_minimum_because_a_rank_raises_ends_with_the_code_of_that(
    tmp_path,
):
    body = """
    rc.init()
    state = rc.elastic.ArrayState(step=0)

    @rc.on_checkpoint
    def save(step):
        print("saved step", state.step, flush=True)

    @rc.elastic.run
    def train(state):
        while state.step < 9:
            rc.barrier()
            if state.step == 4 and os.environ["RANK"] == "1":
                sys.exit(3)
            state.step += 1
            state.commit()

    train(state)
    """
    done = Started(tmp_path, "-np", 2, "--elastic", "2:2", script(tmp_path, body)).finish()
    assert done.code == 3, done
    assert done.out.count("saved step") == 1, done
    assert "the program has failed by itself, so the job is not started again" in done.err


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
@pytest.mark.parametrize("saves", at_length([False, True], [True]))
def test_an_elastic_job_whose_launcher_ends_all_after_mpi_abort_is_not_started_again(
    saves, tmp_path
):
    """The launcher ends the others by SIGTERM, and by SIGKILL those that do more then."""
    body = """
    rc.init()
    state = rc.elastic.ArrayState(step=0)
    if SAVES:
        signal.signal(signal.SIGTERM, lambda *_: time.sleep(60))

    @rc.elastic.run
    def train(state):
        while state.step < 9:
            rc.barrier()
            if state.step == 4 and os.environ["RANK"] == "1":
                from mpi4py import MPI

                MPI.COMM_WORLD.Abort(7)
            state.step += 1
            state.commit()

    train(state)
    """
    program = script(tmp_path, body.replace("SAVES", repr(saves)))
    done = Started(tmp_path, "-np", 2, "--elastic", "2:2", "--grace", 1, program).finish()
    assert done.code == 7, done
    assert "ringcomm run: rank 1 failed - exit 7; logs: run/rank-1.log\n" in done.err
    assert "the program has failed by itself, so the job is not started again" in done.err
    assert not (tmp_path / "run-restart-1").exists()


BESIDE_A_SERVER = """
from ringcomm import ps
rc.init()
me = rc.rank()
ps.init()

@rc.on_checkpoint
def save(step):
    print("saved after step", step, flush=True)

table = ps.table("w", 100, mode="sync")
made = 0  # steps of this worker
while ps.step_number() < N:
    table.push(np.ones(100, np.float32)).wait()
    table.pull().wait()
    if made == 3 and me in WHO:
        DEED
    ps.complete_step()
    made += 1
    time.sleep(PAUSE)
print("trained to the end", flush=True)
"""


def beside_a_server(tmp_path, who, deed, *options, n=10, pause=0.0):
    body = BESIDE_A_SERVER.replace("WHO", repr(who)).replace("DEED", deed)
    body = body.replace("PAUSE", repr(pause))
    program = script(tmp_path, body.replace("< N", f"< {n}"))
    env = {"RINGCOMM_TIMEOUT_S": "20"}
    return Started(tmp_path, "-np", 2, "--servers", 1, *options, program, env=env).finish()


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
@pytest.mark.parametrize("least", at_length([1, 2], [2]))  # a verdict, which tests/unit shows
def test_a_job_whose_workers_all_fail_beside_a_server_has_failed(least, tmp_path):
    done = beside_a_server(tmp_path, (0, 1), "sys.exit(3)", "--elastic", f"{least}:2")
    assert done.code == 3, done
    assert done.end["what"] != "completed"
    assert "the program has failed by itself, so the job is not started again" in done.err


@pytest.mark.at_length  # a verdict, which tests/unit shows, of evidence that other jobs have given
@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
def test_a_job_whose_workers_are_all_killed_beside_a_server_is_started_again(tmp_path):
    deed = "os.kill(os.getpid(), signal.SIGKILL)"
    done = beside_a_server(tmp_path, (0, 1), deed, "--elastic", "1:2", "--restarts", 1)
    assert done.code == 137, done
    assert "the job has lost all its workers; it is started again" in done.err


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
@pytest.mark.parametrize(
    ("deed", "code", "says"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 75, "not started again: --restarts is 0"),
        # A verdict, which tests/unit shows, and a job without a server above.
        *at_length([("sys.exit(3)", 3, None)], []),
    ],
)
def test_with_fewer_workers_than_min_beside_a_server_the_others_save_and_end(
    deed, code, says, tmp_path
):
    options = ("--elastic", "2:2", "--restarts", 0)
    done = beside_a_server(tmp_path, (1,), deed, *options, n=400, pause=0.02)
    assert done.code == code, done
    assert "1 of 2 workers are left, and RINGCOMM_ELASTIC_MIN is 2" in done.out
    assert done.out.count("saved after step") == 1, done
    assert "trained to the end" not in done.out
    assert says is None or says in done.err


@pytest.mark.skipif(IS_MPICH, reason="--elastic needs Open MPI 5")
def test_a_rank_that_stands_by_counts_as_a_worker_that_is_left_and_stops_in_order_after_a_signal(
    tmp_path,
):
    options = ("--elastic", "2:2", "--worker-spares", 1)
    deed = "os.kill(os.getpid(), signal.SIGKILL if me == 1 else signal.SIGUSR1)"
    done = beside_a_server(tmp_path, (1, 2), deed, *options, n=1000, pause=0.02)
    assert done.code == 75, done
    assert "2 workers are left" not in done.out, done
    assert done.out.count("SIGUSR1: the job saves") == 1, done
    assert done.out.count("saved after step") == 2, done
    assert "not started again" not in done.err
