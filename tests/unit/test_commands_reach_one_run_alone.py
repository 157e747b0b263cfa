"""`ringcomm top`, `ctl` and the dashboard show and reach the ranks of the given run, not others."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
from harness import wait_until

from ringcomm.launch import cli
from ringcomm.launch.dashboard import command as dashboard
from ringcomm.launch.dashboard.source import LiveRanks, Source
from ringcomm.launch.job.run_folder import RunFolder, near
from ringcomm.launch.watch import ctl, top
from ringcomm.launch.watch.find_runs import find_job
from ringcomm.launch.watch.prometheus import Pages
from ringcomm.launched import rank_program
from ringcomm.launched.process_stat import ProcessStat

RANK = """
import os, sys
from ringcomm._core import StatusPage

job, rank = sys.argv[1], int(os.environ["RANK"])
page = StatusPage.create(
    job=job, host=os.uname().nodename, rank=rank, size=2, local_rank=rank, nonce=7
)
page.log_scalar("loss", 3, 0.5)
print("there", flush=True)
sys.stdin.read()
"""
SIZE = 2


def start(folder, rank):
    """Start a rank of a run; it ends when its stdin is closed."""
    job = f"{folder.name}-{os.getpid()}"
    program = [sys.executable, "-P", "-c", RANK, job]
    return subprocess.Popen(
        [sys.executable, "-I", "-S", rank_program.__file__, folder, *program],
        env={**os.environ, "RANK": str(rank)},
        stdin=subprocess.PIPE,
    )


@pytest.fixture
def runs(tmp_path):
    """The pids of the live ranks of two runs, whose folders are a and b."""
    pids = {}
    with contextlib.ExitStack() as stack:
        for folder in (RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")):
            folder.create({}, {})
            ranks = [stack.enter_context(start(folder.path, rank)) for rank in range(SIZE)]
            pids[folder.path.name] = [each.pid for each in ranks]
            for log in map(folder.log_of, range(SIZE)):
                wait_until(lambda log=log: log.exists() and log.read_text(), f"{log} is empty")
        yield pids


@pytest.mark.parametrize("name", ["a", "b"])
def test_top_shows_the_ranks_of_the_run(runs, name, tmp_path, capsys):
    assert top.main([str(tmp_path / name), "--json"]) == 0
    assert [each["pid"] for each in json.loads(capsys.readouterr().out)] == runs[name]


@pytest.mark.parametrize("name", ["a", "b"])
def test_ctl_reaches_the_ranks_of_the_run(runs, name, tmp_path):
    _, members, _ = find_job(str(tmp_path / name))
    assert [each.page["pid"] for each in members] == runs[name]


@pytest.mark.parametrize("name", ["a", "b"])
def test_prometheus_gets_the_ranks_of_the_run(runs, name, tmp_path):
    metrics = {each.name: each.samples for each in Pages(str(tmp_path / name)).collect()}
    assert {each.labels["job"] for each in metrics["ringcomm_up"]} == {f"{name}-{os.getpid()}"}


def test_a_run_that_is_over_is_said_to_be_over_although_another_lives(runs, tmp_path, capsys):
    assert runs
    RunFolder(tmp_path / "old").create({}, {})
    assert ctl.main([str(tmp_path / "old"), "stop"]) == 1
    said = capsys.readouterr().err
    assert said == f"ringcomm ctl: no rank of the run {near(tmp_path / 'old')} lives on this host\n"


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_dashboard_shows_the_ranks_of_the_run(runs, name, tmp_path):
    rows = Source(RunFolder(tmp_path / name)).state()["ranks"]
    assert [each["pid"] for each in rows] == runs[name]


def test_a_rank_is_of_no_old_run_whose_ranks_had_its_pid(runs, tmp_path, capsys):
    old = RunFolder(tmp_path / "old")
    old.create({}, {})
    for rank, pid in enumerate(runs["a"]):
        (old.path / f"rank-{rank}.at").write_text(f"{pid} {os.uname().nodename} 1\n")
    assert top.main([str(old.path), "--json"]) == 1
    assert ctl.main([str(old.path), "stop"]) == 1
    assert "no rank of the run" in capsys.readouterr().err
    assert Source(old).state()["ranks"] == []


@pytest.mark.parametrize("number", ["-1", "nan", "inf", "x"])
@pytest.mark.parametrize(
    ("main", "arguments"), [(top.main, ["--interval"]), (ctl.main, ["a", "pause", "--timeout"])]
)
def test_a_time_that_is_none_is_refused(main, arguments, number, capsys):
    with pytest.raises(SystemExit) as refused:
        main([*arguments[:-1], f"{arguments[-1]}={number}"])
    assert refused.value.code == 2
    assert f"'{number}' is not a number of seconds >= 0" in capsys.readouterr().err


@pytest.mark.parametrize("number", ["-1", "65536", "x", "²"])
@pytest.mark.parametrize(
    ("main", "option"), [(top.main, "--prometheus-port"), (dashboard.main, "--port")]
)
def test_a_port_that_is_none_is_refused(main, option, number, capsys):
    with pytest.raises(SystemExit) as refused:
        main([f"{option}={number}"])
    assert refused.value.code == 2
    text = f"'{number}' is not a port: a number from 0 to 65535"
    assert text in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        number = str(listener.getsockname()[1])
        assert top.main(["--prometheus-port", number]) == 1
    assert capsys.readouterr().err == f"ringcomm top: port {number}: Address already in use\n"


# --- by name --------------------------------------------------------------------------------------
@pytest.fixture
def plain(tmp_path):
    """The name of a live job without a folder, which works in the folder `plain`."""
    (tmp_path / "plain").mkdir()
    job = f"plain-{os.getpid()}"
    environ = {name: value for name, value in os.environ.items() if name != "PWD"}
    rank = subprocess.Popen(
        [sys.executable, "-P", "-c", RANK, job],
        cwd=tmp_path / "plain",
        env=environ | {"RANK": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with rank:
        assert rank.stdout.readline()
        yield job


def stacks_of(words, capsys):
    """Return the code, and what is said of a job: a command that asks its ranks for nothing."""
    code = cli.main(["stacks", *words])
    return code, capsys.readouterr().err


def test_a_job_is_meant_by_a_name_or_in_its_folder_and_never_in_another(
    runs, plain, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path / "plain")
    where = f"job {plain}, in {tmp_path / 'plain'}"
    for words in ([""], [], ["latest"], [plain[:-1]]):
        assert stacks_of(words, capsys) == (0, f"ringcomm stacks: {where}\n"), words
    there = f"job a-{os.getpid()}, {tmp_path / 'a'}"
    for words in (["../a"], [str(tmp_path / "a")], [f"a-{os.getpid()}"], ["a", "--runs", ".."]):
        assert stacks_of(words, capsys)[0] == 0, words
    assert stacks_of([str(tmp_path / "a")], capsys)[1] == f"ringcomm stacks: {there}\n"
    monkeypatch.chdir("/")
    code, said = stacks_of([""], capsys)
    assert (code, "there is no live job in this folder; elsewhere there is " in said) == (1, True)
    assert f"{plain} ({tmp_path / 'plain'})" in said
    assert cli.main(["ctl", "", "pause"]) == 1
    assert "name it to mean it" in capsys.readouterr().err
    assert Source(None).command(None).text.startswith("there is no live job in this folder")


def test_the_only_beginning_of_a_name_is_enough(runs, plain, tmp_path, capsys, monkeypatch):
    assert runs
    monkeypatch.chdir(tmp_path)
    RunFolder(tmp_path / "a-later").create({}, {})
    for words, text in [
        (["a-", "--runs", "."], "several begin with 'a-'"),
        (["b", "--runs", "."], ""),
    ]:
        code, said = stacks_of(words, capsys)
        assert (code, text in said) == (int(bool(text)), True), said


def test_a_finished_run_is_said_to_be_over_how_and_when(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "old")
    folder.create({}, {})
    end = {"code": 3, "what": "rank 1 failed", "rank": 1, "report": "", "exit_codes": {}}
    folder.record_end(end | {"ended": "2026-11-20T22:10:15+0000", "seconds": 12.0})
    text = "ended at 2026-11-20 22:10:15: rank 1 failed, exit 3, after 12 s\n"
    for words in (["ctl", "old", "stop"], ["stacks", "old"], ["top", "old", "--once"]):
        assert cli.main(words) == 1
        assert capsys.readouterr().err == f"ringcomm {words[0]}: the run runs/old {text}"
    source, shown = dashboard.source_of("old", tmp_path / "runs", LiveRanks())
    assert (source.folder.path, shown) == (
        folder.path,
        f"shows the run runs/old, which {text[:-1]}",
    )


def test_a_run_whose_ranks_have_all_ended_is_finishing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = RunFolder(tmp_path / "runs" / "x")
    here, me = os.uname().nodename, os.getpid()
    folder.create({"ranks": 3, "host": here, "pid": me}, {})  # `ringcomm run` lives
    no_start = 1  # of this pid, so the process is gone
    for rank, (host, start, end) in enumerate(
        [(here, ProcessStat.of(me).start, "began\nleft\n"), (here, no_start, ""), ("h9", 1, "")]
    ):
        (folder.path / f"rank-{rank}.at").write_text(f"{me} {host} {start}\n")
        (folder.path / f"rank-{rank}.end").write_text(end)

    def said_of_it():
        assert cli.main(["ctl", "x", "stop"]) == 1
        said = capsys.readouterr().err
        assert cli.main(["runs", "--json"]) == 0
        [row] = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "x"]
        return row["state"], said

    state, said = said_of_it()  # of rank 2 only h9 knows
    assert (state, "is through ringcomm.init()" in said) == ("running", True), said
    (folder.path / "rank-2.end").write_text("began\nexit 000\n")
    state, said = said_of_it()
    assert (state, "all ranks of the run runs/x have ended" in said) == ("finishing", True), said


def test_a_command_in_the_place_of_the_run_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["ctl", "timeline", "stop"]) == 1  # it may be a run called timeline
    said = capsys.readouterr().err
    assert "no run and no live job is called 'timeline'" in said
    assert said.endswith("before the command: ringcomm ctl latest timeline stop\n")
    assert cli.main(["ctl", "x", "stop"]) == 1
    assert "before the command" not in capsys.readouterr().err


def test_runs_lists_live_jobs_with_and_without_a_folder(runs, plain, tmp_path, capsys):
    assert runs
    assert cli.main(["runs", "--runs", str(tmp_path), "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert [found[name]["state"] for name in ("a", "b", plain)] == ["running"] * 3
    assert found["a"]["jobs"] == [f"a-{os.getpid()}"]
    assert (found[plain]["folder"], found[plain]["ranks"]) == (None, SIZE)
    assert (found[plain]["last"], found[plain]["best"]) == (0.5, None)
    assert cli.main(["logs", plain]) == 1
    assert "is one of mpirun's, which keeps no logs" in capsys.readouterr().err
