"""`ringcomm run` without a job: its flags, its records, its verdict, its output."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from facts_of_a_good_install import GOOD as GOOD_INSTALL
from harness import run_command, wait_until

from ringcomm._core import record_this_rank_in
from ringcomm.errors import ConfigError
from ringcomm.launch.job import arguments, command
from ringcomm.launch.job.arguments import parse_arguments
from ringcomm.launch.job.output_lines import LauncherText, LinesOf
from ringcomm.launch.job.plan_types import Surroundings
from ringcomm.launch.job.records import (
    Evidence,
    GuardianFile,
    RankEnd,
    RecordedFailure,
    parse_guardian_file,
    parse_rank_end,
)
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.supervisor import Supervisor
from ringcomm.launch.job.verdict import Cause, JobEnding, Verdict, judge_ending
from ringcomm.launched import rank_program
from ringcomm.transport import start_mpi
from ringcomm.transport.start_mpi import start_deadline

# --- flags --------------------------------------------------------------------------------------
# All of horovodrun 0.28's, with a value where it takes one.
HOROVODRUN = """-np 2|--num-proc 2|-cb|--check-build|--disable-cache|--start-timeout 3
--network-interfaces eth0|--output-filename out|--verbose|--config-file f|--hosts h:2|-H h:2
--hostfile HOSTS|-hostfile HOSTS|-p 22|--ssh-port 22|-i key|--ssh-identity-file key
--fusion-threshold-mb 3|--cycle-time-ms 3|--cache-capacity 3|--hierarchical-allreduce
--no-hierarchical-allreduce|--hierarchical-allgather|--no-hierarchical-allgather|--torus-allreduce
--autotune|--no-autotune|--autotune-log-file f|--autotune-warmup-samples 3
--autotune-steps-per-sample 3|--autotune-bayes-opt-max-samples 3
--autotune-gaussian-process-noise 3|--min-np 2|--max-np 3|--min-num-proc 2|--max-num-proc 3
--slots-per-host 3|--elastic-timeout 3|--reset-limit 3|--blacklist-cooldown-range 1 2
--host-discovery-script f|--timeline-filename f|--timeline-mark-cycles|--no-timeline-mark-cycles
--no-stall-check|--stall-check|--stall-check-warning-time-seconds 3
--stall-check-shutdown-time-seconds 3|--mpi-threads-disable|--no-mpi-threads-disable
--mpi-args=-x|--tcp|--binding-args=-x|--num-nccl-streams 3|--thread-affinity 3
--gloo-timeout-seconds 3|--log-level INFO|--log-with-timestamp|--log-without-timestamp
--log-hide-timestamp|--no-log-hide-timestamp|-prefix-timestamp|--prefix-output-with-timestamp
--gloo|--use-gloo|--mpi|--use-mpi|--jsrun"""
FLAGS = HOROVODRUN.replace("\n", "|").split("|")


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_horovodrun_is_understood_or_refused_with_ours(flag, capsys, tmp_path):
    (tmp_path / "hosts").write_text("h1 slots=2")
    flag = flag.replace("HOSTS", str(tmp_path / "hosts"))
    name, argv = flag.split()[0], [*flag.split(), "train.py"]
    if name not in arguments.REFUSED:
        assert parse_arguments(argv, "python").request.program == ("python", "train.py")
        return
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv, "python")
    assert caught.value.code == 2
    assert f"{name} is horovodrun's; here: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "name the program"),
        (["-np", "0", "train.py"], "'0' is not a whole number >= 1"),
        (["-np=-3", "train.py"], "'-3' is not a whole number >= 1"),
        (["--grace", "soon", "train.py"], "'soon' is not a number"),
        (["--np", "4", "train.py"], "run: --np is mpirun's; here: -np 4"),
        (["--np=4", "train.py"], "run: --np is mpirun's; here: -np 4"),
        (["--nproc_per_node", "2", "train.py"], "--nproc_per_node is torchrun's; here: -np 2"),
        (["--nproc-per-node=2", "train.py"], "--nproc-per-node is torchrun's; here: -np 2"),
        (["--servers", "-1", "train.py"], "'-1' is not a whole number >= 0"),
        (["--env", "=3", "train.py"], "'=3' is not NAME"),
        (["--launch", "srun", "train.py"], "arguments: --launch: did you mean --launcher?\n"),
        (["--elastc", "2:4", "train.py"], "arguments: --elastc: did you mean --elastic?\n"),
        (["--server=1", "train.py"], "arguments: --server=1: did you mean --servers?\n"),
        (["--gloos", "train.py"], "arguments: --gloos\n"),  # of horovodrun, and refused
    ],
)
def test_a_wrong_command_line_is_refused(argv, text, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_arguments(argv, "python")
    assert caught.value.code == 2
    assert any(each in capsys.readouterr().err for each in text.split("|"))


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["-H", ""], "-H has ''"),  # of a script whose variable is not set
        (["--hostfile", "image"], "--hostfile image: it is no text"),
        (
            ["--launcher-options", "--bind-to 'core"],
            "--launcher-options --bind-to 'core: No closing",
        ),
        (["--elastic", "1:²"], "--elastic 1:²: it must be MIN:MAX"),
    ],
)
def test_what_is_wrong_with_an_option_is_said_in_one_line(argv, text, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "image").write_bytes(b"\xff\xd8")
    with pytest.raises(ConfigError) as caught:
        parse_arguments([*argv, "train.py"], "python")
    assert str(caught.value).startswith(text)


# --- what a rank starts with --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_RANK": "3",
            },
            ("3", "4", "1", "2"),
        ),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"},
            ("0", "2", "0", "1"),
        ),
        (
            {
                "PMIX_RANK": "1",
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_LOCALID": "1",
            },
            ("1", "2", "1", None),
        ),
    ],
)
def test_torchs_variables_come_from_each_launcher(environ, expected):
    found = rank_program.places(environ)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert tuple(found.get(name) for name in names) == expected


def start(folder, *program, environ):
    return run_command(
        [sys.executable, "-I", "-S", rank_program.__file__, folder, *program], env=environ
    )


SHOW = ("sh", "-c", "echo $RANK of $WORLD_SIZE: $RINGCOMM_RUN_FOLDER; echo err >&2; exit 3")
OF_MPI = {"PATH": os.environ["PATH"], "PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}


def test_a_rank_writes_into_its_log(tmp_path):
    RunFolder(tmp_path).create({}, {})
    job = start(tmp_path, *SHOW, environ=OF_MPI)
    assert (job.returncode, job.stdout, job.stderr) == (3, "", "")
    pid = RunFolder(tmp_path).ranks()[1].pid
    assert (tmp_path / "rank-1.log").read_text() == f"1 of 2: {pid} {tmp_path}\nerr\n"


BATCH_STEP = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}


@pytest.mark.parametrize(
    ("hosts", "node"),
    [(["a:2", "{here}:2"], "1"), (["{here}.a.net:2", "b:2"], "0"), (["a:4"], "0"), ([], "0")],
)
def test_slurms_variables_are_those_of_the_rank_and_not_of_the_batch_step(hosts, node, tmp_path):
    names = [each.format(here=os.uname().nodename) for each in hosts]
    RunFolder(tmp_path).create({"hosts": names}, {})
    environ = {"PATH": os.environ["PATH"], "SLURM_PROCID": "0"} | BATCH_STEP
    mpis = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    show = ("sh", "-c", "echo $SLURM_PROCID $SLURM_NTASKS $SLURM_LOCALID $SLURM_NODEID")
    assert start(tmp_path, *show, environ=environ | mpis).returncode == 0
    assert (tmp_path / "rank-3.log").read_text() == f"3 4 1 {node}\n"


def test_outside_of_slurm_none_of_its_variables_is_made(tmp_path):
    RunFolder(tmp_path).create({}, {})
    assert start(tmp_path, "sh", "-c", "env | grep SLURM", environ=OF_MPI).returncode == 1


def test_a_rank_whose_host_does_not_see_the_folder_says_so_and_goes_on(tmp_path):
    inherited = OF_MPI | {"RINGCOMM_RUN_FOLDER": "1 /elsewhere"}
    job = start(tmp_path, *SHOW, environ=inherited)
    assert (job.returncode, job.stdout) == (3, "1 of 2:\n")
    assert f"does not see {tmp_path}" in job.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_program_that_is_not_there_is_named(tmp_path):
    RunFolder(tmp_path).create({}, {})
    assert start(tmp_path, "no-such-program", environ=OF_MPI).returncode == 127
    assert "no-such-program: No such file" in (tmp_path / "rank-1.log").read_text()


# --- records ------------------------------------------------------------------------------------
NOW = 1_795_987_656_842_555_840  # ns


def failed(rank, code, text="x", evidence=Evidence.OWN, *, at=0):
    return RecordedFailure(rank, code, evidence, at, text)


def test_a_guardian_file_is_read_up_to_what_is_not_whole():
    data = (
        f"watches 12\nnote 3\nÄ\nreport 1 3 own {NOW} 4\nx r\nreport -1 143 asked 8 2\nyy".encode()
    )
    failures = (
        failed(1, 3, "x r\n", at=NOW),
        failed(None, 143, "yy", Evidence.ASKED, at=8),
    )
    read = GuardianFile(12, failures, ("Ä\n",))
    assert parse_guardian_file(data) == read
    assert parse_guardian_file(data + b"end\n").has_ended
    assert parse_guardian_file(data + b"report 2 1 own 7 9\nabc") == read
    assert parse_guardian_file(b"watch") == GuardianFile(0)
    assert parse_guardian_file(data + b"watch\n" + data) == replace(read, is_damaged=True)


def test_the_last_exit_code_of_a_rank_counts():
    assert parse_rank_end(b"began\nleft\nexit 001\nexit 003\n") == RankEnd(has_left=True, code=3)
    assert parse_rank_end(b"began\n") == RankEnd()


def test_the_last_role_of_a_rank_says_whether_it_trains():
    begun = b"began\nrole \nrole spare\n"
    assert (parse_rank_end(begun).is_worker, parse_rank_end(begun).may_train) == (False, True)
    for role in (b"worker", b"rank 2", b""):
        assert parse_rank_end(b"%brole %b\n" % (begun, role)).is_worker
    for role in (b"server 0", b"evaluator"):
        assert not parse_rank_end(b"%brole %b\n" % (begun, role)).may_train


def test_a_rank_records_its_end_only_in_its_own_process(tmp_path):
    path = tmp_path / "rank-0.end"
    code = (
        "import os, sys\n"
        "from ringcomm._core import StatusPage, record_this_rank_in\n"
        "page = StatusPage.create('job', 'host', 0, 1, 0, 1)\n"
        "page.record_this_process()\n"
        f"record_this_rank_in({os.fsencode(path)!r})\n"
        "page.set_state(1); page.set_state(2)\n"
        "if os.fork() == 0: sys.exit(9)\n"
        "os.wait(); page.set_state(3); sys.exit(300)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=False)
    assert path.read_text() == "began\nleft\nexit 044\n"


def test_a_record_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        record_this_rank_in(os.fsencode(tmp_path / "none" / "rank-0.end"))


def test_who_calls_mpi_abort_says_so_last_in_its_log(tmp_path):
    says = "Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 7)"
    for rank, text in enumerate(
        ("one\n", f"{'x' * 9999}\n{says} - process 1\n", f"{says}\n{'y' * 9999}")
    ):
        (tmp_path / f"rank-{rank}.at").write_text("9 h1 1\n")
        (tmp_path / f"rank-{rank}.log").write_text(text)
    (tmp_path / "rank-3.at").write_text("9 h1 1\n")
    assert RunFolder(tmp_path).aborted() == [1]


def test_a_folder_holds_one_run(tmp_path):
    folder = RunFolder.named_by_time(tmp_path / "runs", 0)
    assert folder.claim()
    folder.create({"a": 1}, {"machines": "h1:2\n"})
    config = json.loads((folder.path / "run.json").read_text())
    assert config == {"folder": str(folder.path), "a": 1}
    assert (folder.path / "machines").read_text() == "h1:2\n"
    assert RunFolder.named_by_time(tmp_path / "runs", 0).path.name == folder.path.name + "-2"
    assert not folder.claim()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made.*--run-folder"):
        RunFolder(tmp_path / "file" / "run").claim()


@pytest.mark.parametrize(
    ("flags", "mode"),
    [
        (["--env", "KEY=a secret"], 0o600),
        (["--env", "HOME"], 0o644),
        (["--fusion-threshold-mb", "3"], 0o644),
    ],
)
def test_the_configuration_shows_others_no_value_of_env_and_no_port(
    flags, mode, tmp_path, monkeypatch
):
    environ = {"PATH": "/bin", "HOME": "/home/me"}
    names = {"own_names": frozenset(), "starter": "/v/start.py", "facts": GOOD_INSTALL}
    here = Surroundings(environ=environ, free_port=29511, folder=str(tmp_path), **names)
    monkeypatch.setattr(command, "gather_surroundings", lambda *_: here)
    monkeypatch.setattr(command, "_run", lambda *_: (Verdict(0, ""), None))
    before = os.umask(0)
    try:
        assert command.main(["-np", "2", "--run-folder", str(tmp_path), *flags, "true"]) == 0
    finally:
        os.umask(before)
    path = tmp_path / "run.json"
    assert path.stat().st_mode & 0o777 == mode
    assert json.loads(path.read_text())["variables"]["MASTER_ADDR"] == "127.0.0.1"
    assert "29511" not in path.read_text()


def test_two_runs_of_the_same_second_have_folders_of_their_own(tmp_path):
    one, other = (RunFolder.named_by_time(tmp_path, 0) for _ in range(2))
    assert one.path == other.path
    assert one.claim()
    assert not other.claim()
    assert RunFolder.named_by_time(tmp_path, 0).claim()


def test_a_run_whose_folder_another_takes_meanwhile_is_not_refused(monkeypatch, tmp_path):
    claim, lost = RunFolder.claim, []

    def beaten_once(folder):
        is_free = claim(folder)  # by the other run, the first time
        lost.append(folder.path)
        return is_free and len(lost) > 1

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunFolder, "claim", beaten_once)
    assert command.main(["-np", "1", "true"]) == 0
    other, own = lost
    assert not (other / "end.json").exists()
    assert json.loads((own / "end.json").read_text())["code"] == 0


def test_a_node_file_of_pbs_is_read_only_if_the_hosts_have_no_names(monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PBS_NODEFILE", "/nowhere")
    assert command.main(["-np", "1", "true"]) == 2
    assert "PBS_NODEFILE is /nowhere, which cannot be read" in capfd.readouterr().err
    assert command.main(["-np", "1", "-H", "localhost", "--dry-run", "true"]) == 0


def test_ctrl_c_before_a_job_begins_is_no_traceback(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "gather_surroundings", interrupted)
    assert command.main(["-np", "2", "train.py"]) == 130
    assert list(tmp_path.iterdir()) == []


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_of_what_the_launcher_says_only_the_end_is_kept_in_memory(tmp_path, capfd):
    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    says = "head -c 3000000 /dev/zero | tr '\\0' x; echo; echo the end; exit 3"
    ending = Supervisor(["sh", "-c", says], {}, folder, size=1, grace_s=1).run()
    assert (ending.launcher_code, ending.launcher_text[-9:]) == (3, "\nthe end\n")
    assert len(ending.launcher_text) < 1 << 20
    assert (folder.path / "launcher.log").stat().st_size == 3_000_009
    assert len(capfd.readouterr().err) == 3_000_009


def test_who_has_caught_an_error_of_init_does_not_wait_there(monkeypatch, tmp_path):
    monkeypatch.setenv("RINGCOMM_RUN_FOLDER", f"{os.getpid()} {tmp_path}")
    folder = RunFolder(tmp_path)
    context = start_deadline(math.inf)
    context.__enter__()
    assert len(folder.in_init()) == 1
    assert not context.__exit__(TypeError, TypeError("comm is no communicator"), None)
    assert folder.in_init() == set()


@pytest.mark.parametrize(("rank", "says"), [("0", 1), ("1", 0)])
def test_rank_0_says_once_that_it_waits_long_for_others(rank, says, monkeypatch, capfd):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    monkeypatch.setattr(start_mpi, "_NOTICE_S", 0.01)
    said = []

    def has_said():
        said.append(capfd.readouterr().err)
        return said[-1]

    with start_deadline(math.inf):
        if says:
            wait_until(has_said, "it says nothing")
    has_said()
    assert "".join(said).count("ringcomm.init: rank 0 has waited 0.01 s for others") == says


# --- the verdict --------------------------------------------------------------------------------
GOOD, BAD, LEFT = RankEnd(True, 0), RankEnd(False, 1), RankEnd(True)
KILLED = RankEnd()
OPENMPI_SIGNAL = "prterun noticed that process rank 1 with PID 9 on node vm exited on\nsignal 9 (K"
OPENMPI_EXIT = "   Process name: [prterun-vm-25016@1,1]\n   Exit code:    3\n"
MPICH_SIGNAL = "APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)"


def intel(**signals):
    """Return what Intel MPI's launcher says of ranks that signals have ended."""
    return "".join(
        f"\n{'=' * 83}\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        f"=   RANK {rank[1:]} PID 115{rank[1:]} RUNNING AT vm\n"
        f"=   KILLED BY SIGNAL: {number} (Killed)\n{'=' * 83}\n"
        for rank, number in signals.items()
    )


RAISED = failed(1, 1, "x rank 1 raised\n")
STOPPED = failed(None, 143, "x the job was ended from outside (SIGTERM)\n")
VERDICTS = {
    # ends by rank, failures, launcher's code and text, others -> code, rank
    "all is well": ([GOOD, GOOD], [], 0, "", {}, 0, None),
    "mpirun lies about a good job": ([GOOD, GOOD], [], 137, "", {}, 0, None),
    "mpirun crashes after a good job": ([GOOD, GOOD], [], -11, "", {}, 0, None),
    "mpirun lies about a bad job": ([BAD, RankEnd(False, 3)], [], 0, "", {}, 1, 0),
    "a rank died, and mpirun returned 0": ([GOOD, KILLED], [], 0, "", {}, 1, 1),
    "a host that does not see the folder": ([GOOD, None], [], 0, "", {"seen": [0]}, 0, None),
    "a failure there": ([GOOD, None], [], 3, OPENMPI_EXIT, {"seen": [0]}, 3, 1),
    "beside the ranks of init(comm)": ([GOOD, None], [], 0, "", {}, 0, None),
    "a failure there, without a guardian": ([GOOD, None], [], 3, OPENMPI_EXIT, {}, 3, 1),
    "likewise in an elastic job, whose launcher returns 0 for each": (
        [GOOD, None], [], 0, "", {"least": 1}, 1, 1,
    ),
    "os._exit after shutdown()": ([LEFT, GOOD], [], 0, "", {}, 0, None),
    "killed after shutdown()": ([LEFT, GOOD], [], 137, OPENMPI_SIGNAL, {}, 137, 1),
    "the culprit's code": ([BAD, RankEnd(False, 3)], [failed(1, 3)], 1, "", {}, 3, 1),
    "an exception": ([BAD, BAD], [RAISED], 1, "", {}, 1, 1),
    "SIGKILL by Open MPI": ([BAD, KILLED], [failed(1, 137)], 1, "", {}, 137, 1),
    "SIGKILL of an old kernel": ([BAD, KILLED], [failed(1, 0)], 9, MPICH_SIGNAL, {}, 137, 1),
    "unknown, and mpirun returned 0": ([GOOD, KILLED], [failed(1, 0)], 0, "", {}, 1, 1),
    "SIGKILL that nobody saw; mpirun returns the code of its victim": (
        [RankEnd(False, 14), KILLED],
        [failed(0, 14, evidence=Evidence.MPI), failed(1, 0, evidence=Evidence.SILENT, at=9)],
        14, "", {}, 137, 1,
    ),
    "the same, and mpirun names the victim": (
        [KILLED, KILLED],
        [failed(0, 0, evidence=Evidence.SILENT, at=8)], 3, OPENMPI_EXIT, {}, 137, 0,
    ),
    "a death that nobody saw; mpirun names that rank": (
        [RankEnd(False, 3), KILLED],
        [failed(1, 0, evidence=Evidence.SILENT, at=8)], 3, OPENMPI_EXIT, {}, 3, 1,
    ),
    "another host's victim reports first": (
        [BAD, BAD, BAD],
        [failed(0, 14, evidence=Evidence.MPI), failed(2, 7, at=9)], 1, "", {}, 7, 2,
    ),
    "a rank that is dead, nobody knows how, reports before one that was killed": (
        [BAD, KILLED, KILLED, KILLED],
        [failed(0, 14, evidence=Evidence.MPI), failed(2, 0, evidence=Evidence.SILENT),
         failed(3, 137, evidence=Evidence.KILLED, at=9)],
        14, "", {}, 137, 3,
    ),
    "the first of those killed": (
        [BAD, KILLED, KILLED],
        [failed(1, 137, evidence=Evidence.KILLED, at=9),
         failed(2, 137, evidence=Evidence.KILLED, at=8)],
        14, "", {}, 137, 2,
    ),
    "an exception, after which another host's rank is killed": (
        [BAD, KILLED, BAD],
        [failed(1, 137, evidence=Evidence.KILLED, at=8), failed(2, 1, at=9)], 14, "", {}, 1, 2,
    ),
    "a rank is killed, and another one saves and exits with 75": (
        [RankEnd(False, 75), KILLED],
        [failed(0, 75, at=8), failed(1, 137, evidence=Evidence.KILLED, at=9)], 14, "", {}, 137, 1,
    ),
    "a rank that the launcher ended reports first": (
        [BAD, KILLED, KILLED],
        [failed(1, 143, evidence=Evidence.ASKED), failed(2, 137, evidence=Evidence.KILLED)],
        1, "", {}, 137, 2,
    ),
    "SIGTERM alone": ([KILLED] * 2, [failed(1, 143, evidence=Evidence.ASKED)], 1, "", {}, 143, 1),
    "1 rank": ([RankEnd(True, 3)], [], 3, "", {}, 3, 0),
    "mpirun names the first of bad ranks": (
        [RankEnd(False, 4), RankEnd(False, 3)], [], 3, OPENMPI_EXIT, {}, 3, 1,
    ),
    "no init()": ([], [], 0, "", {}, 0, None),
    "no init(), exit 3": ([], [], 3, OPENMPI_EXIT, {}, 3, 1),
    "no init(), a signal, Open MPI": ([], [], 137, OPENMPI_SIGNAL, {}, 137, 1),
    "no init(), a signal, MPICH": ([], [], 9, MPICH_SIGNAL, {}, 137, None),
    "no init(), MPI_Abort(7), MPICH": ([None] * 3, [], 7, "", {"aborted": [2]}, 7, 2),
    "no init(), two call MPI_Abort": ([None] * 3, [], 7, "", {"aborted": [0, 2]}, 7, None),
    "no init(), SIGSEGV, Intel MPI": ([None] * 3, [], 255, intel(r0=9, r1=11, r2=9), {}, 139, 1),
    "no init(), SIGTERM, Intel MPI": ([None] * 2, [], 255, intel(r0=9, r1=15), {}, 143, 1),
    "no init(), SIGKILL, Intel MPI": ([None] * 3, [], 255, intel(r0=9, r1=9, r2=9), {}, 137, None),
    "no init(), 1 rank, Intel MPI": ([None], [], 255, intel(r0=9), {}, 137, 0),
    "no init(), exit 3, of which Intel MPI does not speak": (
        [None] * 3, [], 255, intel(r0=9, r2=9), {}, 255, 1,
    ),
    "no init(), two exits, Intel MPI": ([None] * 3, [], 255, intel(r0=9), {}, 255, None),
    "killed before init(), Intel MPI": (
        [None] * 2, [], 255, intel(r1=9), {"lost_before_init": 1}, 137, 1,
    ),
    "SIGKILL of an old kernel, Intel MPI": (
        [BAD, KILLED], [failed(1, 0)], 255, intel(r0=9, r1=9), {}, 137, 1,
    ),
    "mpirun killed": ([], [], -9, "", {}, 137, None),
    "mpirun killed, and its ranks asked to end": ([KILLED] * 2, [STOPPED], -9, "", {}, 137, None),
    "mpirun killed, and a rank raises for want of the others": (
        [BAD, KILLED], [failed(1, 143, evidence=Evidence.ASKED)], -9, "", {}, 137, None,
    ),
    "mpirun crashed": ([KILLED] * 2, [STOPPED], -11, "", {}, 139, None),
    "mpirun aborted, and its proxy killed the ranks": (
        [KILLED] * 2, [failed(0, 137, evidence=Evidence.KILLED)], -6, "", {}, 134, None,
    ),
    "mpirun crashed after it had named a rank": (
        [KILLED] * 2, [failed(1, 137, evidence=Evidence.KILLED)], -11, OPENMPI_SIGNAL, {}, 137, 1,
    ),
    "mpirun crashed after a rank had raised": ([BAD, KILLED], [RAISED], -11, "", {}, 1, 1),
    "mpirun killed, and `ringcomm run` had ended it": (
        [KILLED] * 2, [failed(1, 139)], -9, "", {"is_launcher_ended": True}, 139, 1,
    ),
    "mpirun killed after all had stopped in order": (
        [RankEnd(True, 75)] * 2, [], -9, "", {"is_stopped": True}, 75, None,
    ),
    "asked, and stopped in order": ([GOOD, GOOD], [], 0, "", {"asked": 15}, 75, None),
    "asked, exit 75": ([RankEnd(False, 75)] * 2, [failed(0, 75)], 75, "", {"asked": 15},
                       75, None),
    "stopped by ctl": ([GOOD, GOOD], [], 0, "", {"is_stopped": True}, 75, None),
    "stopped by ctl, exit 75": ([RankEnd(False, 75)] * 2, [failed(0, 75)], 75, "",
                                {"is_stopped": True}, 75, None),
    "stopped by ctl, and failed": ([RankEnd(False, 1), GOOD], [failed(0, 1)], 1, "",
                                   {"is_stopped": True}, 1, 0),
    "exit 75 without being asked": ([RankEnd(False, 75)] * 2, [failed(0, 75)], 75, "", {},
                                    75, 0),
    "asked, no handler": ([KILLED] * 2, [STOPPED], 143, "", {"asked": 15}, 143, None),
    "Ctrl-C": ([BAD, BAD], [failed(None, 130)], 1, "", {"asked": 2}, 130, None),
    "hang-up": ([KILLED] * 2, [failed(0, 129)], 129, "", {"asked": 1}, 129, None),
    "killed with mpirun after the grace period": ([KILLED] * 2, [failed(0, 0)], -9, "",
                                                  {"asked": 2}, 130, None),
    "killed after the grace period": ([KILLED] * 2, [failed(0, 137)], 137, "",
                                      {"asked": 15}, 143, None),
    "asked, but a rank raised": ([BAD, BAD], [RAISED], 1, "", {"asked": 15}, 1, 1),
    "ended by a scheduler": ([KILLED] * 2, [STOPPED], 143, "", {}, 143, None),
    "a death in an elastic job": ([GOOD, KILLED], [failed(1, 137)], 137, "",
                                  {"least": 1}, 0, None),
    "more deaths than an elastic job may have": (
        [GOOD, KILLED], [failed(1, 137)], 0, "", {"least": 2}, 137, 1,
    ),
    "SIGTERM to some ranks of an elastic job": (
        [GOOD, KILLED, KILLED],
        [STOPPED, *(failed(rank, 143, evidence=Evidence.ASKED) for rank in (1, 2))], 0, "",
        {"least": 1}, 0, None,
    ),
    "all dead in an elastic job, nobody saw how, and mpirun returns 1": (
        [KILLED] * 2, [failed(1, 0), failed(0, 0)], 1, "", {"least": 1}, 137, 1,
    ),
    "all dead in an elastic job": ([KILLED] * 2, [failed(1, 137), failed(0, 139)], 0,
                                   "", {"least": 1}, 137, 1),
    "too few are left in an elastic job": (
        [KILLED, RankEnd(False, 75), GOOD],
        [failed(0, 137, evidence=Evidence.KILLED), failed(1, 75)], 0, "", {"least": 2}, 75, None,
    ),
    "a failure beside those that stop": (
        [RankEnd(False, 75), RankEnd(False, 3)], [failed(1, 3), failed(0, 75)], 0, "",
        {"least": 2}, 3, 1,
    ),
    "stopped by ctl in an elastic job that has lost a rank": (
        [RankEnd(True, 75), KILLED], [failed(1, 137), failed(0, 75)], 0, "",
        {"least": 1, "is_stopped": True}, 75, None,
    ),
    "nobody calls init() in an elastic job": ([None, None], [], 0, "",
                                              {"least": 1}, 1, None),
    "lost before init() in an elastic job": (
        [None, None], [], 143, "", {"least": 1, "lost_before_init": 1}, 1, 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict(name):
    ends, failures, code, text, others, expected, rank = VERDICTS[name]
    verdict = judge_ending(
        JobEnding(
            size=len(ends) or 2,
            ends={rank: end for rank, end in enumerate(ends) if end is not None},
            failures=tuple(failures),
            launcher_code=code,
            launcher_text=text,
            **{"seen": range(len(ends))} | others,
        )
    )
    assert (verdict.code, verdict.rank) == (expected, rank)


@pytest.mark.parametrize(
    ("number", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (6, "SIGABRT"), (40, "signal 40")]
)
def test_a_launcher_that_is_killed_is_named_with_the_signal(number, name):
    ending = JobEnding(
        size=2,
        ends={0: KILLED, 1: KILLED},
        seen=range(2),
        failures=(STOPPED,),
        launcher_code=-number,
        launcher="srun",
        least=1,
    )
    verdict = judge_ending(ending)
    assert verdict.what == f"the launcher, srun, was killed by {name}, and not the program"
    assert (verdict.code, verdict.cause) == (128 + number, Cause.LAUNCHER)


# --- output -------------------------------------------------------------------------------------
def test_lines_are_shown_whole_with_their_rank():
    lines = LinesOf(b"[1] ")
    assert lines.add(b"a\nb") == b"[1] a\n"
    assert lines.add(b"c\n\n") == b"[1] bc\n\n"
    assert lines.add(b"\r 50%\r 60") == b"\r[1]  50%\r"
    assert lines.flush() == b"[1]  60\n"
    assert lines.flush() == b""


MESSAGES = [
    "-" * 74 + "\nprterun detected that one or more processes exited with non-zero status,\n"
    "   Exit code:    3\n" + "-" * 74 + "\n",
    "=" * 83 + "\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n"
    + "=" * 83 + "\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n",
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_about_deaths_are_held_back(message):
    text = LauncherText()
    data = f"before\n{message}after\n".encode()
    shown = b"".join(text.add(data[i : i + 7]) for i in range(0, len(data), 7)) + text.flush()
    assert shown == b"before\nafter\n"
    assert b"".join(text.held) == message.encode()


def test_other_messages_of_the_launcher_are_shown():
    message = "-" * 74 + "\nThere are not enough slots available\n" + "-" * 74 + "\nrest"
    text = LauncherText()
    assert text.add(message.encode()) + text.flush() == f"{message}\n".encode()
    assert text.held == []
    assert LauncherText().add(b"") == b""
    assert (cut := LauncherText()).add(
        b"-" * 74 + b"\nhalf"
    ) + cut.flush() == b"-" * 74 + b"\nhalf\n"
