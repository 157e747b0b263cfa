"""`ringcomm run` believes no record that others have forged, and signals only processes of its job.

Whoever owns the folder of all runs can rename that of a run, and put another in its place.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from harness import DEADLINE_S, wait_until
from other_users import IS_ROOT, OTHER, give_to_another
from planted_files import in_time, plant

from ringcomm._core import Watchdog
from ringcomm.errors import ConfigError
from ringcomm.launch.dashboard.source import Source, newest_run
from ringcomm.launch.job.processes.local_ranks import is_of_run, ranks_here, send_signal
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.supervisor import Supervisor, supervise
from ringcomm.launch.job.verdict import judge_ending
from ringcomm.launch.watch import ctl
from ringcomm.launched import rank_program
from ringcomm.launched.launcher_door import LAUNCH_AGENT, agent_with_door, with_door
from ringcomm.launched.process_stat import ProcessStat

BECOME = [sys.executable, "-I", "-S", rank_program.__file__]
SLEEPS = ("sleep", "600")


@contextmanager
def sleeper(*program, **options):
    """Yield a process of this user that ends by a signal alone, and then end it."""
    process = subprocess.Popen([*program, *SLEEPS], **options)
    try:
        # Popen() returns before the kernel shows it.
        wait_until(Path(f"/proc/{process.pid}/environ").read_bytes, "it has no environment")
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def record_of(process):
    return f"{process.pid} {os.uname().nodename} {ProcessStat.of(process.pid).start}\n"


def a_run(path, size=2):
    folder = RunFolder(path)
    assert folder.claim()
    folder.create({"ranks": size}, {})
    return folder


# --- signals --------------------------------------------------------------------------------------
def test_a_process_that_a_record_names_is_not_signalled_unless_it_is_of_the_run(tmp_path):
    folder = a_run(tmp_path / "run")
    with sleeper() as process:
        (folder.path / "rank-0.at").write_text(record_of(process))
        ranks = ranks_here(folder)
        assert ranks[0].lives
        for launcher in (None, process.pid + 1):
            assert send_signal(signal.SIGKILL, ranks, folder, launcher) == ranks
        assert process.poll() is None


# Rank 1 tells `ringcomm run`, $PPID of the launcher, to pass SIGUSR1 on, and ends with it.
LAUNCHER = """
import os, subprocess, sys
become, folder, record = sys.argv[1:-2], sys.argv[-2], sys.argv[-1]
with open(f"{folder}/rank-0.at", "w") as file:
    file.write(record)
rank = f'trap "exit 7" USR1; kill -USR1 {os.getppid()}; sleep 600 & wait'
sys.exit(subprocess.call([*become, folder, "sh", "-c", rank], env={**os.environ, "RANK": "1"}))
"""


def test_a_signal_that_is_passed_on_reaches_the_ranks_alone(tmp_path, capfd):
    folder = a_run(tmp_path / "run")
    with sleeper() as process:
        argv = [sys.executable, "-c", LAUNCHER, *BECOME, str(folder.path), record_of(process)]
        ending = Supervisor(argv, os.environ, folder, size=2, grace_s=1).run()
        assert ending.launcher_code == 7
        assert process.poll() is None
    said = capfd.readouterr().err
    assert said.count(f"rank 0: process {process.pid}, which it has recorded, shows no sign") == 1
    assert "rank 1: process" not in said


def without_descriptors(pid, flags=0):
    raise OSError(38, "Function not implemented")


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_rank_gets_signals_also_on_an_old_kernel(has_descriptors, tmp_path, monkeypatch):
    if not has_descriptors:
        monkeypatch.setattr(os, "pidfd_open", without_descriptors)
    folder = a_run(tmp_path / "run")
    with sleeper(*BECOME, folder.path, env={**os.environ, "RANK": "0"}) as process:
        wait_until(lambda: folder.ranks() or process.poll() is not None, "no rank is there")
        assert send_signal(signal.SIGTERM, ranks_here(folder), folder) == {}
        assert process.wait(DEADLINE_S) == -signal.SIGTERM


def test_each_sign_that_a_process_is_of_the_run_is_enough(tmp_path):
    folder, other = a_run(tmp_path / "run"), a_run(tmp_path / "run-2")
    marked = {**os.environ, "RINGCOMM_RUN_FOLDER": f"1 {folder.path}"}
    with folder.log_of(0).open("wb") as log:
        signs = [
            ({"env": marked}, None),
            ({"stdout": log}, None),
            ({"stderr": log}, None),
            ({"start_new_session": True}, os.getpid()),  # it descends from the launcher
            ({}, os.getsid(0)),  # it is in the launcher's session
        ]
        for options, launcher in signs:
            with sleeper(**options) as process:
                (folder.path / "rank-0.at").write_text(record_of(process))
                rank = folder.ranks()[0]
                assert is_of_run(rank, 0, folder, launcher)
                assert is_of_run(rank, 0, folder) is (launcher is None)
                assert not is_of_run(rank, 0, other)


# --- folders --------------------------------------------------------------------------------------
def test_another_folder_in_its_place_changes_nothing(tmp_path):
    folder = a_run(tmp_path / "run")
    (folder.path / "rank-0.end").write_text("began\nexit 003\n")
    folder.path.rename(tmp_path / "own")
    forged = tmp_path / "run"
    forged.mkdir()
    with sleeper() as process:
        (forged / "rank-0.at").write_text(record_of(process))
        (forged / "rank-0.end").write_text("began\nleft\nexit 000\n")
        (forged / "stopped").touch()
        ending = Supervisor(["sh", "-c", "exit 3"], {}, folder, size=2, grace_s=1).run()
        assert ranks_here(folder) == {}
    assert {rank: end.code for rank, end in ending.ends.items()} == {0: 3}
    assert not ending.is_stopped
    folder.record_end({"code": 3})
    assert json.loads((tmp_path / "own" / "end.json").read_text()) == {"code": 3}
    assert not (forged / "end.json").exists()
    assert not (forged / "launcher.log").exists()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_is_no_folder_of_a_run(is_there, tmp_path):
    (tmp_path / "run").symlink_to(tmp_path / "other")
    if is_there:
        (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be made.*run.*--run-folder"):
        RunFolder(tmp_path / "run").claim()
    assert list(tmp_path.rglob("*log")) == []


@pytest.mark.parametrize("mode", [0o707, 0o777, 0o1777])
def test_a_folder_that_every_user_can_write_is_refused(mode, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(mode)
    with pytest.raises(ConfigError, match=f"every user .mode {mode:04o}.*--run-folder"):
        RunFolder(tmp_path / "run").claim()


def test_a_folder_of_another_user_is_refused_and_gets_no_command(tmp_path, monkeypatch, capsys):
    folder = a_run(tmp_path / "run")
    give_to_another(folder.path, monkeypatch)
    text = f"belongs to user {os.stat(folder.path).st_uid}"
    with pytest.raises(ConfigError, match=rf"{text}.*--run-folder"):
        RunFolder(folder.path).claim()
    assert ctl.main([str(folder.path), "stop"]) == 1
    assert text in capsys.readouterr().err
    for source in (Source(RunFolder(folder.path)), Source(newest_run(tmp_path))):
        assert text in source.command(None).text


RECORDS_ITS_END = """
import sys
from ringcomm._core import record_this_rank_in
record_this_rank_in(sys.argv[1].encode())
"""


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_the_files_of_a_run_are_its_users_to_write_whatever_the_umask(mask, tmp_path):
    before = os.umask(mask)
    try:
        folder = a_run(tmp_path / "run")
        end = folder.path / "rank-0.end"
        argv = [*BECOME, folder.path, sys.executable, "-P", "-c", RECORDS_ITS_END, end]
        subprocess.run(argv, env={**os.environ, "RANK": "0"}, check=True, timeout=120)
        folder.record_end({"code": 0})
        folder.end_those_in_init("a text")
    finally:
        os.umask(before)
    paths = [folder.path, *folder.path.iterdir()]
    assert {"rank-0.at", "rank-0.log", "rank-0.end", "end.json"} <= {path.name for path in paths}
    modes = {path.name: path.stat().st_mode & 0o777 for path in paths}
    expected = dict.fromkeys(modes, 420 & ~mask) | {"run": 0o755 & ~mask}
    assert modes == expected


# --- records --------------------------------------------------------------------------------------
def plant_link(path):
    (path.parent.parent / "target").write_text("began\nleft\nexit 000\n")
    path.symlink_to(path.parent.parent / "target")


WAYS = {
    "is a link": ("rank-0.end", plant_link),
    "is no regular file": ("rank-0.end", os.mkfifo),
    "is of no rank: there are 2": ("rank-2.end", lambda path: path.write_text("began\nexit 000\n")),
}


@pytest.mark.parametrize("what", WAYS)
def test_a_planted_record_does_not_count_and_is_named(what, tmp_path, capfd):
    folder = a_run(tmp_path / "run")
    name, plant = WAYS[what]
    plant(folder.path / name)
    ending = Supervisor(["sh", "-c", "exit 4"], {}, folder, size=2, grace_s=1).run()
    assert ending.ends == {}
    assert judge_ending(ending).code == 4
    assert f"{name} in the folder of the run {what}: it does not count" in capfd.readouterr().err


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
@pytest.mark.parametrize("name", ["rank-0.end", "rank-0.at", "guardian-0", "stopped"])
def test_a_record_of_another_user_does_not_count(name, tmp_path):
    folder = a_run(tmp_path / "run")
    with sleeper() as process:
        path = folder.path / name
        path.write_text(record_of(process) if name.endswith(".at") else "began\nexit 000\n")
        os.chown(path, OTHER, OTHER)
        assert (folder.ranks(), folder.ends(), folder.guardians()) == ({}, {}, [])
        assert not folder.is_stopped
    assert folder.problems == {name: f"belongs to user {OTHER}"}


@pytest.mark.parametrize(
    "name", ["rank-00.end", "rank-\u0660.end", "rank-+0.end", "rank-0.end.new"]
)
def test_a_record_has_one_name(name, tmp_path):
    folder = a_run(tmp_path / "run")
    (folder.path / name).write_text("began\nexit 000\n")
    assert folder.ends() == {}


# --- the launcher's own files ---------------------------------------------------------------------
SAYS = """
if test -d "$path"; then stat -c "%a %u" "$path"; touch "$path/left"; fi; echo "$path"
"""
PLACES = {
    # variable: what the user may have set
    "PRTE_MCA_prte_local_tmpdir_base": {"PRTE_MCA_prte_tmpdir_base": "/scratch"},
    "OMPI_MCA_btl_sm_backing_directory": {"OMPI_MCA_btl_sm_backing_directory": ""},
}


@pytest.mark.parametrize(("mode", "is_there"), [(0o1777, True), (0o777, False), (0o700, True)])
def test_sessions_of_prterun_are_not_where_every_user_can_replace_them(
    mode, is_there, tmp_path, monkeypatch
):
    folder = a_run(tmp_path / "run")
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(mode)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    says = "echo $PRTE_MCA_prte_local_tmpdir_base"
    elsewhere = {"PRTE_MCA_prte_remote_tmpdir_base": "/scratch"}  # of other hosts
    environ = {"PATH": os.environ["PATH"], **elsewhere}
    job = Supervisor(["sh", "-c", says], environ, folder, size=1, grace_s=1, forks_ranks=True)
    where = str(Path(job.run().launcher_text.strip()).parent)
    assert where == (str(tmp_path / "tmp") if is_there else "/dev/shm")


@pytest.mark.parametrize("given", ["", "libm.so.6"])
def test_the_launcher_alone_has_the_library_that_guards_its_ports(given, tmp_path):
    folder = a_run(tmp_path / "run", size=1)
    environ = {"PATH": os.environ["PATH"], "RANK": "0"} | ({"LD_PRELOAD": given} if given else {})
    says = 'echo $LD_PRELOAD; exec "$0" "$@"'
    argv = ["sh", "-c", says, *BECOME, folder.path, "sh", "-c", "echo $LD_PRELOAD; cat run.json"]
    job = Supervisor(argv, environ, folder, size=1, grace_s=1, forks_ranks=True).run()
    assert job.launcher_text.strip() == with_door(given) != given
    assert folder.log_of(0).read_text().splitlines()[0] == given


@pytest.mark.parametrize("given", ["", "valgrind prted"])
def test_the_launcher_is_told_to_start_prted_with_that_library(given, tmp_path):
    folder = a_run(tmp_path / "run", size=1)
    environ = {"PATH": os.environ["PATH"]} | ({LAUNCH_AGENT: given} if given else {})
    argv = ["sh", "-c", f"echo ${LAUNCH_AGENT}"]
    job = Supervisor(argv, environ, folder, size=1, grace_s=1, forks_ranks=True).run()
    assert job.launcher_text.strip() == agent_with_door(given) != ""


@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("variable", PLACES)
def test_files_of_mpi_are_in_a_folder_that_nobody_can_have_made_before(
    variable, is_given, tmp_path
):
    folder = a_run(tmp_path / "run")
    given = PLACES[variable] if is_given else {}
    environ = {"PATH": os.environ["PATH"], **given}
    job = Supervisor(
        ["sh", "-c", f"path=${variable}{SAYS}"],
        environ,
        folder,
        size=1,
        grace_s=1,
        forks_ranks=True,
    )
    said = job.run().launcher_text.splitlines()
    if is_given:
        assert said == [""]
        return
    facts, path = said
    assert facts == f"700 {os.geteuid()}"
    assert not os.path.exists(path)


@pytest.mark.parametrize(
    "what", ["of another user", "a link", "for all to write", "of another run"]
)
def test_nothing_is_started_that_another_folder_names(what, tmp_path, monkeypatch, capfd):
    mark = tmp_path / "started"
    config = {"ranks": 1, "launcher": ["touch", str(mark)], "variables": {}}
    mine, other = RunFolder(tmp_path / "mine"), RunFolder(tmp_path / "other")
    for each in (mine, other):
        assert each.claim()
        each.create(config, {})
    mine.path.rename(tmp_path / "away")  # as who can write TMPDIR can
    if what == "a link":
        mine.path.symlink_to(tmp_path / "away")
    else:
        other.path.rename(mine.path)
    if what == "of another user":
        give_to_another(mine.path, monkeypatch)
    elif what == "for all to write":
        mine.path.chmod(0o777)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    with pytest.raises((SystemExit, OSError)) as ended:
        supervise(str(mine.path), forks_ranks=False)
    assert str(mine.path) in str(ended.value)
    assert not mark.exists()


# --- ranks ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["rank-0.log", "rank-0.at", "rank-0.end"])
def test_a_rank_writes_through_no_link(name, tmp_path):
    folder = a_run(tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("years of work\n")
    (folder.path / name).symlink_to(precious)
    argv = [*BECOME, folder.path, sys.executable, "-P", "-c", RECORDS_ITS_END]
    env = {**os.environ, "RANK": "0"}
    subprocess.run([*argv, folder.path / "rank-0.end"], check=False, env=env, timeout=120)
    assert precious.read_text() == "years of work\n"


RECORDS_ALL = """
import os, sys
from ringcomm._core import StatusPage, record_this_rank_in
from ringcomm.launched.child_marks import create_run_file, run_file
from ringcomm.launched.rank_process import note_rank_process
page = StatusPage.create("j", "h", 0, 1, 0, 5)
page.record_this_process()
record_this_rank_in(os.fsencode(run_file("rank-0.end")))
print("began", flush=True)
sys.stdin.readline()
page.set_role("worker")
note_rank_process()
for name in ("metrics.jsonl", "stopped"):
    try:
        os.close(create_run_file(run_file(name)))
    except OSError as error:
        print(error.strerror)
sys.stdout.flush()
os._exit(3)
"""


def state_of(path):
    return {each.name: each.read_bytes() for each in path.iterdir()}


@pytest.mark.parametrize("comes", ["before the rank", "after it has begun"])
def test_a_rank_writes_nothing_into_the_folder_of_another_run(comes, tmp_path):
    mine, other = a_run(tmp_path / "A").path, a_run(tmp_path / "B").path
    before = state_of(other)

    def swap():  # as the owner of the folder of all runs can
        mine.rename(tmp_path / "C")
        other.rename(mine)

    if comes == "before the rank":
        swap()
    argv = [*BECOME, mine, sys.executable, "-P", "-c", RECORDS_ALL]
    env = {**os.environ, "RANK": "0"}
    with subprocess.Popen(argv, env=env, stdin=-1, stdout=-1, stderr=-1) as rank:
        if comes == "after it has begun":
            wait_until(lambda: b"began" in state_of(mine).get("rank-0.log", b""), "it begins")
            swap()
        _, said = rank.communicate(b"\n", timeout=120)
    assert state_of(mine) == before
    if comes == "before the rank":
        assert f"does not see {mine} (it is that of another run)".encode() in said
    else:
        log = (tmp_path / "C" / "rank-0.log").read_text()
        assert log.count("another folder is in the place of that of the run") == 2


@pytest.mark.parametrize("name", ["run", "r\u00fcn \u4e00", 'a "b" \\c', "a\nb", "\udcff"])
def test_ranks_know_the_folder_of_their_run_whatever_its_name(name, tmp_path):
    folder = a_run(tmp_path / name)
    env = {"PATH": os.environ["PATH"], "RANK": "0"}
    subprocess.run([*BECOME, folder.path, "echo", "x"], env=env, timeout=120, check=True)
    assert folder.log_of(0).read_text() == "x\n"


@pytest.mark.parametrize("what", ["a pipe", "a device", "of another user", "a link"])
def test_what_others_have_planted_does_not_end_a_rank_in_init(what, tmp_path, monkeypatch):
    path = tmp_path / "lost-before-init"
    if what == "of another user":
        path.write_text("forged")
        give_to_another(path, monkeypatch)
        if not IS_ROOT:
            pytest.skip("only root can give files away")
    elif what == "a link":
        (tmp_path / "text").write_text("forged")
        path.symlink_to(tmp_path / "text")
    else:
        plant(path, what)
    waiting = Watchdog(DEADLINE_S, "too late", os.fsencode(path), DEADLINE_S, "")
    time.sleep(1.1)  # it looks once a second, and would end this process if the file counted
    with in_time():
        waiting.cancel()


@pytest.mark.parametrize("way", ["of another user", "a link"])
def test_a_rank_goes_on_and_writes_nothing_where_others_decide(way, tmp_path, monkeypatch, capfd):
    folder = a_run(tmp_path / "run")
    path = tmp_path / "link"
    if way == "a link":
        path.symlink_to(folder.path)
    else:
        path = folder.path
        give_to_another(path, monkeypatch)
        if not IS_ROOT:
            pytest.skip("the program of the rank is another process")
    env = {"PATH": os.environ["PATH"], "RANK": "0"}
    job = subprocess.run([*BECOME, path, "echo", "x"], env=env, timeout=120, check=True)
    assert job.returncode == 0
    out, said = capfd.readouterr()
    assert out == "x\n"
    assert f"does not see {path}" in said
    assert {each.name for each in folder.path.iterdir()} == {"launcher.log", "run.json"}
