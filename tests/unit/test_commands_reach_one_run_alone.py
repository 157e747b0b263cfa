"""`ringcomm top`, `ctl` and the dashboard show and reach the ranks of the given run, not others."""

import contextlib
import json
import os
import socket
import subprocess
import sys

import pytest
from harness import wait_until

from ringcomm.launch.dashboard import command as dashboard
from ringcomm.launch.dashboard.source import Source
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.watch import ctl, top
from ringcomm.launch.watch.prometheus import Pages
from ringcomm.launch.watch.send_command import look
from ringcomm.launched import rank_program

RANK = """
import os, sys
from ringcomm._core import StatusPage

job, rank = sys.argv[1], int(os.environ["RANK"])
page = StatusPage.create(
    job=job, host=os.uname().nodename, rank=rank, size=2, local_rank=rank, nonce=7
)
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
    _, members = look(str(tmp_path / name))
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
    assert said == f"ringcomm ctl: no rank of the run {tmp_path / 'old'} lives on this host\n"


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
