"""Files that others have put somewhere: no command and no rank waits for one, or shows nothing.

Each of them is named in one sentence, and the good ones beside it are used.
"""

import json
import logging
import os
import sys
from dataclasses import replace

import numpy as np
import pytest
from harness import at_length
from loopback import LoopbackHub
from planted_files import PLANTS, WITHOUT_END, in_time, plant
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm._core import StatusPage
from ringcomm._version import __version__
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.config import Settings
from ringcomm.elastic import commit_file
from ringcomm.engine.api import tuning_files
from ringcomm.engine.control.commands import parse
from ringcomm.foreign_text import parsed_json
from ringcomm.launch import command_line
from ringcomm.launch.cli import main
from ringcomm.launch.dashboard.source import Source, newest_run
from ringcomm.launch.job import local_job, show
from ringcomm.launch.job.run_folder import RunFolder, near
from ringcomm.launch.watch import ctl, other_hosts, timeline_command, top
from ringcomm.launch.watch.find_ranks import _sample
from ringcomm.launch.watch.rank_rows import RankSample, title_of
from ringcomm.launch.watch.which_run import KnownRun
from ringcomm.launched import rank_program
from ringcomm.regular_files import BrokenFileError, read_regular

ESCAPES = "\x1b]0;title\x07\x1b[2Jno\rh\u202e1\udcff"  # a title, an empty screen, other directions


def what_a_rank_shows(host="h1", op="allreduce[x]"):
    """Return a rank of another host, as it is seen there."""
    page = StatusPage.create("job-9", "h1", 1, 2, 0, 5)
    facts = {**page.snapshot(), "host": host, "op_name": op, "op_state": 1, "state": 1}
    events = [(0, f"began on {host}")]
    sample = _sample(page, 10**9, {})
    return RankSample(
        10**9, facts, [("loss", 3, float("nan"))], events, sample.process, f"ended {host}"
    )


def a_run(path, host="h1"):
    """Return the folder of a run of 2 ranks: one is of another host, which has reported it."""
    folder = RunFolder(path)
    assert folder.claim()
    folder.create({"ranks": 2}, {})
    rank = what_a_rank_shows(host)
    pid = rank.page["pid"]
    folder.put("rank-1.at", f"{pid} {host} 77\n".encode(errors="surrogateescape"))
    folder.put(f"host-{'h1'}.json", other_hosts._content(host, [rank]))
    folder.log_of(1).write_bytes(b"hello\n")
    return folder


def shown(folder):
    """Return what top shows of a run, and what it says of its files."""
    jobs = top.Jobs(str(folder.path))
    samples = jobs.look()
    return top._plain(jobs, samples, {}), "\n".join(jobs.problems)


def test_what_another_host_reports_is_shown(tmp_path):
    folder = a_run(tmp_path / "run")
    text, problems = shown(folder)
    assert f"job job-9, {near(folder.path)}: 1 of 2 ranks live on h1" in text
    assert "loss=nan" in text
    assert problems == ""
    state = Source(folder).state()
    assert [row["rank"] for row in state["ranks"]] == [1]
    assert state["late"] == ""


def test_a_command_for_ranks_of_other_hosts_alone_says_where_they_are(tmp_path):
    folder = a_run(tmp_path / "run")
    rank = what_a_rank_shows()
    report = replace(rank, page={**rank.page, "takes_commands": True})
    folder.put("host-h1.json", other_hosts._content("h1", [report]))
    outcome = Source(folder).command(parse(["pause"]))
    assert not outcome.is_done
    assert outcome.text == "no rank on this host takes commands: give it on h1"


OF_RANKS = {
    "a page without a size": lambda rank: rank["page"].pop("size"),
    "a rank in words": lambda rank: rank["page"].update(rank="one"),
    "a rank that is true": lambda rank: rank["page"].update(rank=True),
    "a host that is a number": lambda rank: rank["page"].update(host=7),
    "another state": lambda rank: rank["page"].update(state=77),
    "another end": lambda rank: rank["page"].update(end_kind=77),
    "a number of 65 bits": lambda rank: rank["page"].update(op_start_ns=1 << 64),
    "half a fact": lambda rank: rank["page"].update(is_paused=0.5),
    "no process": lambda rank: rank.pop("process"),
    "CPU time without end": lambda rank: rank["process"].update(cpu_s=float("inf")),
    "a value in words": lambda rank: rank["scalars"].append(["loss", 3, "low"]),
    "an event without a text": lambda rank: rank["events"].append([3]),
    "an event that is a number": lambda rank: rank["events"].append([3, 4]),
    "a step of three parts": lambda rank: rank["steps"].append([1, [1, 2, 3], [0, 0]]),
    "a step of words": lambda rank: rank["steps"].append([1, list("12345"), [0] * 4]),
    "an end of several words": lambda rank: rank.update(ending=["a", "b"]),
    "a time in words": lambda rank: rank.update(time_ns="now"),
}
OF_HOSTS = {
    "another name": lambda report: report.update(host=None),
    "a time that is none": lambda report: report.update(time=float("nan")),
    "ranks that are none": lambda report: report.update(ranks=3),
    "a rank that is none": lambda report: report.update(ranks=[3]),
    "traffic in words": lambda report: report.update(traffic=[["a", "b", "c", "d", "e"]]),
    "traffic of two counts": lambda report: report.update(traffic=[["a", "b", 1, 2]]),
    "traffic of nobody": lambda report: report.update(traffic=[[1, 2, 3, 4, 5]]),
}


@pytest.mark.parametrize("change", [*OF_RANKS, *OF_HOSTS])
def test_a_report_of_another_type_is_none(change):
    report = json.loads(other_hosts._content("h1", [what_a_rank_shows()]))
    assert other_hosts.parse_report(json.dumps(report).encode(), 0.0).host == "h1"
    if change in OF_RANKS:
        OF_RANKS[change](report["ranks"][0])
    else:
        OF_HOSTS[change](report)
    with pytest.raises(ValueError, match="is no report of a host by this version"):
        other_hosts.parse_report(json.dumps(report).encode(), 0.0)


@pytest.mark.parametrize(
    "text", ["NaN", "[-Infinity]", '{"a": 1e999}', "9" * 5000, "{", "[" * 200_000, b"\xff\xff"]
)
def test_json_says_finite_numbers_or_is_none(text):
    with pytest.raises(ValueError, match=r"^is no JSON: "):
        parsed_json(text)


NAMES = ("host-a.json", "rank-0.at", "run.json", "end.json")


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("name", NAMES)
def test_top_and_the_dashboard_show_a_run_whatever_is_put_in_its_folder(name, what, tmp_path):
    folder = a_run(tmp_path / "run")
    plant(folder.path / name, what)
    with in_time():
        text, problems = shown(folder)
        state = Source(folder).state()
    json.dumps(state, allow_nan=False)
    if name != "run.json" or what not in WITHOUT_END:
        assert [row["rank"] for row in state["ranks"]] == [1]
    if name == "host-a.json":
        assert "1 of 2 ranks live on h1" in text
        assert problems.startswith(f"{folder.path / name} ")
        assert problems.count("it does not count") == 1
    if name != "run.json":
        assert state["late"].count(f"{name} ") == 1, state
        assert state["late"].endswith(": it does not count")


@pytest.mark.parametrize("what", PLANTS)
@pytest.mark.parametrize("name", ["run.json", "end.json", "metrics.jsonl"])
def test_runs_lists_a_run_whatever_is_put_in_its_folder(name, what, tmp_path, capsys):
    folder = a_run(tmp_path / "a")
    plant(folder.path / name, what)
    a_run(tmp_path / "b")
    with in_time():
        assert main(["runs", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr()
    names = {line.split()[0] for line in said.out.splitlines()}
    assert {"a", "b"} <= names
    require_plain(said.out + said.err)
    if name != "metrics.jsonl" or what in WITHOUT_END:
        assert said.err.count(f"{folder.path / name} ") == 1, said.err


@pytest.mark.parametrize("what", [each for each in PLANTS if each != "a terabyte"])  # is text
def test_logs_waits_for_no_file_that_is_none(what, tmp_path, capsys):
    folder = a_run(tmp_path / "run")
    plant(folder.log_of(0), what)
    with in_time():
        assert main(["logs", str(folder.path), "--grep", "hello"]) == 0
    said = capsys.readouterr()
    assert "[1] hello\n" in said.out
    require_plain(said.out)


@pytest.mark.parametrize("what", PLANTS)
def test_a_log_that_is_none_is_empty(what, tmp_path):
    folder = a_run(tmp_path / "run")
    plant(folder.log_of(1), what)
    with in_time():
        text = Source(folder).log(1)
    assert len(text) <= 1 << 16
    assert bool(text) is (what not in ("a pipe", "a device"))


def test_the_newest_run_is_shown_beside_one_that_is_closed_to_this_user(tmp_path, monkeypatch):
    a_run(tmp_path / "new")
    a_run(tmp_path / "closed")
    os.utime(tmp_path / "new" / "run.json", (1, 1))
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: path.name != "closed" and access(path, mode)
    )
    assert newest_run(tmp_path).path.name == "new"


@pytest.mark.parametrize("what", PLANTS)
def test_what_supervises_a_job_may_leave_any_record_of_its_end(what, tmp_path):
    folder = a_run(tmp_path / "run")
    plant(folder.path / "end.json", what)
    with in_time():
        verdict = local_job._verdict(folder, -9)
    assert verdict.code == -9
    assert str(folder.path / "end.json") in verdict.what


@pytest.mark.parametrize("what", PLANTS)
def test_a_rank_begins_whatever_the_configuration_of_its_run_is(what, tmp_path):
    plant(tmp_path / "run.json", what)
    with in_time():
        assert rank_program._node_in(str(tmp_path), "h1") is None


# --- tuning tables --------------------------------------------------------------------------------
@pytest.mark.parametrize("what", PLANTS)
def test_init_goes_on_without_a_table_that_is_none(what, tmp_path, caplog):
    table = TimeTable("2 hosts x 1 rank", "threads", __version__, {"allreduce": {8: {"ring": 1.0}}})
    settings = Settings(tuning=str(tmp_path))
    path = tuning_files.save(settings, table)
    plant(path, what)
    with in_time():
        assert tuning_files.load(settings, LoopbackHub(2).transport(0)) == ""
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"{path} is ignored: it ")


# --- timelines ------------------------------------------------------------------------------------
def a_timeline(path, label="barrier"):
    events = [
        {"pid": 0, "tid": 0, "ph": "M", "ts": 0.0, "name": "process_name", "args": {"host": "h"}},
        {"pid": 0, "tid": 0, "ph": "B", "ts": 1.0, "name": label},
        {"pid": 0, "tid": 0, "ph": "E", "ts": 2.0},
    ]
    path.write_text("[\n" + "".join(f"{json.dumps(each)},\n" for each in events))


EVENTS = {
    "no thread": {"pid": 1, "ph": "B", "ts": 1.0, "name": "x"},
    "no phase": {"pid": 1, "tid": 0, "ts": 1.0, "name": "x"},
    "another phase": {"pid": 1, "tid": 0, "ph": ["B"], "ts": 1.0, "name": "x"},
    "a time in words": {"pid": 1, "tid": 0, "ph": "B", "ts": "noon", "name": "x"},
    "a time that is none": {"pid": 1, "tid": 0, "ph": "B", "ts": float("nan"), "name": "x"},
    "a time without end": {"pid": 1, "tid": 0, "ph": "B", "ts": 10**400, "name": "x"},
    "no name": {"pid": 1, "tid": 0, "ph": "B", "ts": 1.0},
    "a rank in words": {"pid": "one", "tid": 0, "ph": "B", "ts": 1.0, "name": "x"},
    "no args": {"pid": 1, "tid": 0, "ph": "M", "ts": 1.0, "name": "process_name"},
    "bytes in words": {"pid": 1, "tid": 0, "ph": "B", "ts": 1.0, "name": "x",
                       "args": {"nbytes": "many"}},
}  # fmt: skip


@pytest.mark.parametrize("what", [*PLANTS, *EVENTS])
def test_timelines_are_merged_whatever_lies_beside_them(what, tmp_path, capsys):
    a_timeline(tmp_path / "timeline.0.json")
    bad = tmp_path / "timeline.1.json"
    if what in EVENTS:
        bad.write_text(f"[\n{json.dumps(EVENTS[what])},\n")
    else:
        plant(bad, what)
    with in_time():
        merged = timeline_command.main(["merge", str(tmp_path), "-o", str(tmp_path / "all.json")])
        assert (merged, timeline_command.main(["summary", str(tmp_path)])) == (0, 0)
    events = json.loads((tmp_path / "all.json").read_text(), parse_constant=pytest.fail)
    assert len(events["traceEvents"]) == 3
    said = capsys.readouterr()
    assert "1 ranks, 1 operations" in said.out
    lines = said.err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith(f"ringcomm timeline: {bad} ") for line in lines)


def test_a_line_that_is_no_event_is_told(tmp_path, capsys):
    path = tmp_path / "timeline.0.json"
    a_timeline(path)
    path.write_text(path.read_text() + '{"pid": 0,\n')
    assert timeline_command.main(["summary", str(path)]) == 0
    said = f"ringcomm timeline: {path} has 1 line that is no event, as if it were damaged: left out"
    assert capsys.readouterr().err.strip() == said
    path.write_text(path.read_text()[:-1])  # the last line of a rank that was killed
    assert timeline_command.main(["summary", str(path)]) == 0
    assert capsys.readouterr().err == ""


# --- commits --------------------------------------------------------------------------------------
def test_the_count_of_commits_may_be_a_pipe_that_somebody_holds_open(tmp_path):
    path = tmp_path / "state.count"
    os.mkfifo(path)
    holder = os.open(path, os.O_RDWR)
    try:
        with in_time():
            assert commit_file.KeptFile(tmp_path / "state", 1)._n_counted() == 0
    finally:
        os.close(holder)


# --- checkpoints ----------------------------------------------------------------------------------
@pytest.mark.parametrize("what", WITHOUT_END)
@pytest.mark.parametrize("name", ["manifest.json", "server-0.json", "server-0.data-2-0"])
def test_a_part_of_a_checkpoint_of_servers_may_be_no_file(name, what, tmp_path, caplog):
    for value in (1.0, 2.0):
        run_workers(1, lambda rank, value=value: save(tmp_path, value), 2)
    path = tmp_path / "save-00000002" / name
    plant(path, what)
    with in_time():
        assert (ps.load_state_dict(tmp_path)["w"] == 1).all()
    assert str(path) in caplog.text or (name == "manifest.json" and what != "a terabyte")


def save(root, value):
    t = ps.table("w", 300, updater=ps.optim.Add(), block_nbytes=400)
    t.push(np.full(300, value, np.float32)).wait()
    ps.save(root, background=False)


# --- what all of them use -------------------------------------------------------------------------
@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_a_file_is_read_up_to_its_end(size, tmp_path):
    (tmp_path / "file").write_bytes(b"x" * size)
    assert read_regular(tmp_path / "file", 100) == b"x" * size
    (tmp_path / "file").write_bytes(b"x" * 101)
    with pytest.raises(BrokenFileError, match="more than the 100 bytes"):
        read_regular(tmp_path / "file", 100)


@pytest.mark.parametrize("path", at_length(["/proc/kmsg", "/proc/self/mem"], ["/proc/kmsg"]))
def test_a_file_of_proc_is_not_waited_for(path):
    with in_time(), pytest.raises((BrokenFileError, OSError)):
        read_regular(path, 100)
    assert read_regular("/proc/self/comm").endswith(b"\n")  # its length is said to be 0


# --- terminals ------------------------------------------------------------------------------------
def require_plain(text):
    assert text.replace("\n", "").isprintable(), text


def test_no_name_of_a_host_or_an_operation_changes_the_terminal(tmp_path, capsys, monkeypatch):
    rank = what_a_rank_shows(ESCAPES, f"[/]{ESCAPES}")
    require_plain(title_of([rank]))
    folder = a_run(tmp_path / "run", ESCAPES.replace(" ", "").replace("\r", ""))
    (folder.path / f"host-{ESCAPES[:-1]}.json").write_text("{}")
    text, problems = shown(folder)
    require_plain(text)
    assert "1 of 2 ranks live" in text
    monkeypatch.setattr(top, "_watch", lambda jobs, interval_s: 0)
    top.main([str(folder.path)])
    assert "title" in problems
    show.say(f"none is on {ESCAPES}")
    command_line.refuse("ctl", f"several live jobs fit: {ESCAPES}")
    main(["runs", "--runs", str(tmp_path)])
    a_timeline(tmp_path / "timeline.0.json", ESCAPES)
    (tmp_path / "timeline.\x1b[2J.json").touch()
    timeline_command.main(["summary", str(tmp_path)])
    said = capsys.readouterr()
    assert said.out.count("title") == 1
    assert said.err.count("title") == 4
    require_plain(said.out + said.err)


def test_stacks_and_answers_of_a_job_do_not_change_the_terminal(monkeypatch, capsys):
    rank = what_a_rank_shows()
    run = KnownRun("", f"/{ESCAPES}", True, (ESCAPES,))
    monkeypatch.setattr(ctl, "find_job", lambda job, runs: (None, [rank], run))
    monkeypatch.setattr(ctl, "stacks_of", lambda page: f"Thread 1\n  File {ESCAPES}\n")
    assert ctl.main(["", "stacks"]) == ctl.stacks([]) == 0
    said = capsys.readouterr()
    assert said.out.count("Thread 1\n  File") == 2
    require_plain(said.out + said.err)


def test_a_log_gives_a_terminal_no_command(tmp_path, capsys):
    folder = a_run(tmp_path / "run")
    text = f"a {ESCAPES}\tb\n\x1b[1;31mred\x1b[m\x9b\n"
    folder.log_of(1).write_bytes(text.encode(errors="ignore"))
    assert main(["logs", str(folder.path)]) == 0
    out = capsys.readouterr().out
    require_plain(out.replace("\t", " "))
    assert out == "[1] h 1\tb\n[1] red \n"


def test_a_host_may_be_called_like_markup_of_rich(tmp_path):
    console = pytest.importorskip("rich.console")
    folder = a_run(tmp_path / "run", "[/]")
    jobs = top.Jobs(str(folder.path))
    terminal = console.Console(file=sys.stderr, width=200, record=True)
    terminal.print(top._rich(jobs, jobs.look(), {}))
    assert "ranks live on [/]" in terminal.export_text()
