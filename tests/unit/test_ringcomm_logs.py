"""`ringcomm logs`: the lines of all ranks, in the order of time where they have one."""

import os
import threading

import pytest

from ringcomm.launch.cli import main
from ringcomm.launch.job.run_folder import RunFolder, near
from ringcomm.launch.watch.log_order import in_order, shown_line

END = {"code": 3, "what": "rank 1 failed", "rank": 1, "report": "", "exit_codes": {}}


def a_run(path, logs, *, size=3, end=END):
    folder = RunFolder(path)
    assert folder.claim()
    folder.create({"ranks": size, "host": os.uname().nodename, "pid": os.getpid()}, {})
    for rank, text in logs.items():
        folder.log_of(rank).write_bytes(text.encode())
    if end is not None:
        folder.record_end(end)
    return folder


def texts(logs):
    return [f"{rank} {line}" for rank, line in in_order(logs)]


# --- the order ------------------------------------------------------------------------------------
def test_lines_with_times_are_in_their_order_and_others_stay_behind_theirs():
    logs = {
        0: ["begins", "2026-11-20 22:10:03,5 a", "  of a", "2026-11-20 22:10:05 d"],
        1: ["[2026-11-20T22:10:04.25 c", "2026-11-20T22:10:04.3 c2"],
        2: ["2026-11-20 22:10:03.123456 b0", "2026-11-20 22:10:03 earlier", "of it"],
    }
    assert texts(logs) == [
        "0 begins",
        "2 2026-11-20 22:10:03.123456 b0",
        "2 2026-11-20 22:10:03 earlier",
        "2 of it",
        "0 2026-11-20 22:10:03,5 a",
        "0   of a",
        "1 [2026-11-20T22:10:04.25 c",
        "1 2026-11-20T22:10:04.3 c2",
        "0 2026-11-20 22:10:05 d",
    ]


def test_without_times_rank_follows_rank():
    assert texts({0: ["a", "b"], 1: ["c"], 2: []}) == ["0 a", "0 b", "1 c"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("loss 0.25", "loss 0.25"),
        ("a\tb\r", "a\tb"),
        ("10%\r20%\r", "20%"),  # a progress bar
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x1b[2J\x1bcx\x9b31m", " cx 31m"),
        ("größe", "größe"),
    ],
)
def test_a_line_is_shown_without_what_commands_a_terminal(line, shown):
    assert shown_line(line) == shown


# --- the command ----------------------------------------------------------------------------------
LOGS = {0: "a 1\nb 2\n", 1: "c 3\nd", 2: "\ne 5\n"}


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        ([], ["[0] a 1", "[0] b 2", "[1] c 3", "", "[2] e 5", "[1] d"]),
        (["--rank", "1"], ["c 3", "d"]),
        (["--rank", "2", "--rank", "1"], ["[1] c 3", "", "[2] e 5", "[1] d"]),
        (["--grep", "[a-c] [23]"], ["[0] b 2", "[1] c 3"]),
        (["--follow", "--rank", "0"], ["a 1", "b 2"]),  # it is over
    ],
)
def test_the_lines_of_ranks_are_printed(options, lines, tmp_path, capsys):
    a_run(tmp_path / "run", LOGS)
    assert main(["logs", str(tmp_path / "run"), *options]) == 0
    said = capsys.readouterr()
    assert said.out.splitlines() == lines
    assert said.err == (
        f"ringcomm logs: the run {near(tmp_path / 'run')} ended: rank 1 failed, exit 3\n"
    )


def test_a_run_is_found_by_name_and_latest_is_the_default(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "runs" / "2026-11-20", {0: "old\n"}, size=1)
    a_run(tmp_path / "runs" / "2026-11-21", {0: "new\n"}, size=1)
    os.utime(tmp_path / "runs" / "2026-11-20" / "run.json", (1, 1))
    monkeypatch.setattr("ringcomm.launch.watch.find_ranks.Ranks.sample", lambda *_: [])
    for words, out in [
        ([], "new"),
        (["latest"], "new"),
        (["2026-11-20"], "old"),
        (["runs/2026-11-20"], "old"),
        (["runs/2026-11-21/"], "new"),
        (["runs/latest"], "new"),
    ]:
        assert main(["logs", *words]) == 0
        assert capsys.readouterr().out == f"{out}\n", words
    for words, text in [
        (["2026-11"], "several begin with '2026-11': 2026-11-21, 2026-11-20. Name one"),
        (["runs/2026"], "several begin with '2026': 2026-11-21, 2026-11-20. Name one"),
        (["x"], "no run and no live job is called 'x'; there is 2026-11-21, 2026-11-20"),
        (["elsewhere/x"], "no run and no live job is called 'x'; there is none"),
        (["2026-11-20", "--rank", "1"], "runs/2026-11-20 has 1 rank, 0, and no rank 1"),
    ]:
        assert main(["logs", *words]) == 1
        assert capsys.readouterr().err == f"ringcomm logs: {text}\n", words


def test_a_run_without_a_log_says_where_mpirun_s_output_is(tmp_path, capsys):
    folder = a_run(tmp_path / "run", {})
    assert main(["logs", str(folder.path)]) == 1
    assert capsys.readouterr().err.endswith(f"no rank of {near(folder.path)} has a log\n")
    (folder.path / "launcher.log").write_text("mpirun: no room")
    assert main(["logs", str(folder.path), "--rank", "1"]) == 1
    said = capsys.readouterr().err
    text = f"rank 1 of {near(folder.path)} has no log; what mpirun has said is in "
    assert said.endswith(f"{text}{folder.path}/launcher.log\n")


@pytest.mark.parametrize("option", ["--grep=(", "--rank=-1", "--rank=x"])
def test_an_option_that_is_none_is_refused(option, capsys):
    with pytest.raises(SystemExit) as refused:
        main(["logs", option])
    assert refused.value.code == 2
    assert capsys.readouterr().err.startswith("ringcomm logs: argument --")


def test_follow_prints_what_comes_until_the_run_is_over(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ringcomm.launch.watch.logs_command._TICK_S", 0.01)
    monkeypatch.setattr("ringcomm.launch.watch.logs_command._LOOK_S", 0.05)
    folder = a_run(tmp_path / "run", {0: "a\nb"}, end=None)  # this process is its starter
    found = []
    thread = threading.Thread(
        target=lambda: found.append(main(["logs", str(folder.path), "--follow"]))
    )
    thread.start()
    with folder.log_of(0).open("ab") as log:
        log.write(b"b\nc\n")
    folder.log_of(2).write_bytes(b"later\nhalf")  # a rank that has started meanwhile
    folder.record_end(END)
    thread.join(60)
    said = capsys.readouterr()
    assert found == [0]
    assert sorted(said.out.splitlines()) == ["[0] a", "[0] bb", "[0] c", "[2] half", "[2] later"]
    assert said.err.endswith(f"the run {near(folder.path)} ended: rank 1 failed, exit 3\n")
