"""`ringcomm top`, `ctl` and the dashboard show and reach the ranks of the given run, not others."""

import contextlib
import json
import os
import subprocess
import sys

import pytest

from ringcomm.launch.dashboard.source import Source
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.watch import ctl, top
from ringcomm.launch.watch.prometheus import Pages
from ringcomm.launch.watch.send_command import look

RANK = """
import os, sys
from ringcomm._core import StatusPage

job, rank, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
host = os.uname().nodename
page = StatusPage.create(job=job, host=host, rank=rank, size=2, local_rank=rank, nonce=7)
with open(f"{folder}/rank-{rank}.at", "w") as file:
    file.write(f"{os.getpid()} {host}\\n")
print("there", flush=True)
sys.stdin.read()
"""
SIZE = 2


@pytest.fixture
def runs(tmp_path):
    """The folders of two runs, a and b, with their live ranks; name -> pids."""
    with contextlib.ExitStack() as stack:
        pids = {}
        for name in ("a", "b"):
            folder = tmp_path / name
            RunFolder(folder).create({}, {})
            ranks = [
                stack.enter_context(
                    subprocess.Popen(
                        [sys.executable, "-P", "-c", RANK, f"{name}-{os.getpid()}", str(r), folder],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        text=True,
                    )
                )
                for r in range(SIZE)
            ]
            assert [each.stdout.readline() for each in ranks] == ["there\n"] * SIZE
            pids[name] = [each.pid for each in ranks]
        yield pids  # the ranks end when their stdin is closed


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


@pytest.mark.parametrize("number", ["-1", "nan", "inf", "x"])
@pytest.mark.parametrize(
    ("main", "arguments"), [(top.main, ["--interval"]), (ctl.main, ["a", "pause", "--timeout"])]
)
def test_a_time_that_is_none_is_refused(main, arguments, number, capsys):
    with pytest.raises(SystemExit) as refused:
        main([*arguments[:-1], f"{arguments[-1]}={number}"])
    assert refused.value.code == 2
    assert f"'{number}' is not a number of seconds >= 0" in capsys.readouterr().err


def test_a_port_that_is_none_is_refused(capsys):
    assert top.main(["--prometheus-port", "99999999"]) == 1
    assert "ringcomm top: port 99999999: " in capsys.readouterr().err
