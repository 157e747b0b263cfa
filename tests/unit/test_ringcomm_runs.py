"""`ringcomm runs`, and which run a word on the command line means."""

import json
import os
import time
from dataclasses import replace

import pytest

from ringcomm.launch.cli import main
from ringcomm.launch.dashboard.all_runs import AllRuns
from ringcomm.launch.dashboard.source import LiveRanks
from ringcomm.launch.job.records import RunConfig, RunEnd, parse_run_config, parse_run_end
from ringcomm.launch.job.run_folder import RunFolder, time_text
from ringcomm.launch.job.run_words import seconds_text
from ringcomm.launch.watch.find_runs import facts_of, metric_of, why_not_live
from ringcomm.launch.watch.rank_rows import Process, RankSample
from ringcomm.launch.watch.run_rows import (
    MetricValues,
    RunFacts,
    over_text,
    program_text,
    table,
)
from ringcomm.launch.watch.which_run import KnownRun, NoSuchRunError, choose
from ringcomm.status.page_enums import PageState

OLD = KnownRun("/w/runs/2026-11-20T10-00-00", "runs/2026-11-20T10-00-00", True, began_s=1)
NEW = KnownRun("/w/runs/2026-11-20T22-10-03", "runs/2026-11-20T22-10-03", True, ("1c0e",), True, 2)
PLAIN = KnownRun("", "/w", True, ("1d00",), began_s=3)
ELSEWHERE = KnownRun("/v/runs/2026-11-21", "/v/runs/2026-11-21", False, ("77aa",), began_s=9)
OTHERS = KnownRun("/w/runs/x", "runs/x", True, (), False, 7)


# --- what a word means ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("latest", [OLD, NEW, ELSEWHERE], NEW),
        ("latest", [OLD, PLAIN, NEW], PLAIN),  # a job under plain mpirun in this folder
        ("latest", [OLD, OTHERS], OLD),  # not that of another user
        ("latest", [OTHERS], OTHERS),
        ("2026-11-20T22-10-03", [OLD, NEW], NEW),
        ("2026-11-20T1", [OLD, NEW, ELSEWHERE], OLD),
        ("1c", [OLD, NEW, PLAIN], NEW),
        ("77aa", [NEW, ELSEWHERE], ELSEWHERE),
        ("", [OLD, NEW, ELSEWHERE], NEW),
        ("", [OLD, PLAIN, ELSEWHERE], PLAIN),
        ("x", [OTHERS, KnownRun("/w/runs/x-restart-1", "", True)], OTHERS),  # the whole name
    ],
)
def test_a_word_means_one_run(word, known, meant):
    assert choose(word, known) == meant


@pytest.mark.parametrize(
    ("word", "known", "text"),
    [
        ("", [], "there is no live job of this user on this host"),
        ("", [OLD], "there is no live job of this user on this host"),
        (
            "",
            [OLD, ELSEWHERE],
            "there is no live job in this folder; elsewhere there is 77aa (/v/runs/2026-11-21): "
            "name it to mean it",
        ),
        ("latest", [ELSEWHERE], "there is no run in this folder yet; elsewhere there is 77aa"),
        ("2026-11-21", [OLD, ELSEWHERE], "no run and no live job is called '2026-11-21'; there is"),
        ("z", [], "no run and no live job is called 'z'; there is none"),
        (
            "z",
            [OLD, NEW, PLAIN],
            "'z'; there is 1d00 (/w), 2026-11-20T22-10-03, 2026-11-20T10-00-00",
        ),
        ("z", [OLD] * 9, " and 4 more (`ringcomm runs` lists them)"),
    ],
)
def test_a_word_that_means_none_is_told_what_there_is(word, known, text):
    with pytest.raises(NoSuchRunError) as refused:
        choose(word, known)
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("2026", "several begin with '2026': 2026-11-20T22-10-03, 2026-11-20T10-00-00. Name one"),
        ("", "several live jobs are in this folder: 1d00 (/w), 2026-11-20T22-10-03. Name one"),
    ],
)
def test_a_word_that_means_several_is_refused_with_their_names(word, text):
    with pytest.raises(LookupError) as refused:
        choose(word, [OLD, NEW, PLAIN, ELSEWHERE])
    assert str(refused.value) == text
    assert not isinstance(refused.value, NoSuchRunError)


# --- how a run ended ------------------------------------------------------------------------------
def ended(code, what, rank=None, seconds=12.0):
    return RunEnd(code, what, rank, "", {}, "2026-11-20T22:10:15+0000", seconds)


def facts(end=None, **fields):
    config = RunConfig(("/usr/bin/python3", "train.py"), 2, "2026-11-20T22:10:03+0000", host="h9")
    return RunFacts("a", "runs/a", True, config, end, **fields)


LOST = "lost rank 1 (raised ValueError) on the way"


def with_lost(*args):
    return facts(replace(ended(*args), lost={1: "raised ValueError"}))


@pytest.mark.parametrize(
    ("run", "ranks"),
    [
        (facts(), "2"),
        (facts(is_live=True), "2"),
        (facts(is_live=True, n_gone=1), "1 of 2"),
        (facts(is_live=None, n_gone=1), "2"),
        (RunFacts("a", "", True, RunConfig(), is_live=True, n_gone=1), ""),
    ],
)
def test_a_live_run_says_how_many_of_its_ranks_live(run, ranks):
    assert run.ranks == ranks


@pytest.mark.parametrize(
    ("run", "state", "how"),
    [
        (facts(ended(0, "completed", seconds=231.4)), "completed", "after 231 s"),
        (facts(ended(3, "rank 1 failed", 1)), "failed", "rank 1 failed, exit 3, after 12 s"),
        (facts(ended(75, "stopped in order")), "stopped", "stopped in order, exit 75, after 12 s"),
        (facts(ended(130, "ended by SIGINT")), "stopped", "ended by SIGINT, exit 130, after 12 s"),
        (facts(ended(130, "rank 0 failed", 0)), "failed", "rank 0 failed, exit 130, after 12 s"),
        (facts(ended(1, "x", seconds=None)), "failed", "x, exit 1"),
        (with_lost(0, "completed"), "completed", f"after 12 s, {LOST}"),
        (with_lost(75, "too few"), "stopped", f"too few, exit 75, after 12 s, {LOST}"),
        (with_lost(1, "rank 2 failed", 2), "failed", "rank 2 failed, exit 1, after 12 s"),
        (facts(is_live=True), "running", ""),
        (facts(is_live=True, is_finishing=True), "finishing", ""),
        (facts(is_live=True, is_paused=True), "paused", ""),
        (facts(ended(0, "completed"), is_paused=True), "completed", "after 12 s"),
        (facts(is_live=None), "not seen", "only h9 knows"),
        (facts(), "lost", "left no record of its end, as after a kill of `ringcomm run`"),
    ],
)
def test_state_of_a_run_and_how_it_ended(run, state, how):
    assert (run.state, run.how) == (state, how)


def test_of_a_run_that_has_ended_one_sentence_says_how_and_when():
    text = "the run runs/a ended at 2026-11-20 22:10:15: "
    assert over_text(facts(ended(0, "completed"))) == f"{text}completed after 12 s"
    assert (
        over_text(facts(ended(3, "rank 1 failed", 1))) == f"{text}rank 1 failed, exit 3, after 12 s"
    )
    assert over_text(with_lost(0, "completed")) == f"{text}completed after 12 s, {LOST}"
    assert over_text(facts()).startswith("the run runs/a left no record of its end")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234, "1.2 s"), (231.4, "231 s"), (5400, "90 min"), (18_720, "5 h 12 min")],
)
def test_a_duration_has_the_unit_that_a_reader_would_take(seconds, text):
    assert seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (["/usr/bin/python3.11", "train.py", "--lr", "0.1"], "train.py --lr 0.1"),
        (["python", "-m", "package.train"], "-m package.train"),
        (["python3", "-P", "-u", "train.py"], "train.py"),
        (["./serve", "a b"], "./serve 'a b'"),
        (["python"], "python"),
        ([], ""),
        (["python", "x" * 40 + ".py"], "x" * 29 + "..."),
        (["python", "a\x1b[31m.py"], "'a [31m.py'"),
    ],
)
def test_a_program_is_shown_without_its_interpreter(program, text):
    assert program_text(program) == text


def test_a_table_has_the_columns_that_a_run_fills():
    runs = [
        facts(ended(3, "rank 1 failed", 1), metric=MetricValues(0.25, 0.125)),
        facts(is_live=True),
    ]
    assert table(runs, "loss").splitlines() == [
        "run  program   state    ranks  started              how it ended                       "
        "loss: last  best",
        "a    train.py  failed   2      2026-11-20 22:10:03  rank 1 failed, exit 3, after 12 s  "
        "0.25        0.125",
        "a    train.py  running  2      2026-11-20 22:10:03",
    ]
    plain = RunFacts("1c0e", "/w", False, RunConfig(), None, True, ("1c0e",))
    assert table([plain], "loss").endswith("/w, under mpirun: listed while it lives")
    shown = table([facts(is_live=True)], "loss")
    assert ("how it ended" in shown, "loss" in shown, "where" in shown) == (False, False, False)


def test_records_of_an_older_version_and_values_of_another_type_are_left_out():
    old = {"code": 0, "what": "completed", "rank": None, "report": "", "exit_codes": {}}
    assert parse_run_end(json.dumps(old).encode()).seconds is None
    wrong = old | {"seconds": "soon", "ended": 3, "lost": {"1": 3, "-1": "x"}}
    assert parse_run_end(json.dumps(wrong).encode()) == parse_run_end(json.dumps(old).encode())
    wrong = {"program": ["a", 3], "ranks": "2", "pid": -1, "host": ["h"], "started": None}
    assert parse_run_config(json.dumps(wrong).encode()) == RunConfig()
    with pytest.raises(ValueError, match="is no configuration of a run"):
        parse_run_config(b"[]")


def test_parameters_and_versions_of_a_run_are_texts():
    said = {
        "commit": "01ab",
        "versions": {"python": "3.12", "mpi": None},
        "settings": {"RINGCOMM_PARAM_LR": "0.1", "RINGCOMM_ELASTIC": "1"},
        "variables": {"RINGCOMM_PARAM_BATCH": "64", "RINGCOMM_PARAM_X": 3},
    }
    config = parse_run_config(json.dumps(said).encode())
    assert (config.commit, config.versions) == ("01ab", (("python", "3.12"),))
    assert config.parameters == (("lr", "0.1"), ("batch", "64"))
    wrong = {"commit": 3, "versions": ["a"], "settings": "x", "variables": 3}
    assert parse_run_config(json.dumps(wrong).encode()) == RunConfig()


# --- the list -------------------------------------------------------------------------------------
def a_run(path, end=None, **config):
    folder = RunFolder(path)
    assert folder.claim()
    folder.create({"ranks": 2, "host": os.uname().nodename, **config}, {})
    if end is not None:
        folder.record_end(end)
    return folder


END = {"code": 3, "what": "rank 1 failed", "rank": 1, "report": "", "exit_codes": {}}


@pytest.fixture
def no_job(monkeypatch):
    """No live job, as of another test."""
    monkeypatch.setattr("ringcomm.launch.watch.find_ranks.Ranks.sample", lambda *_: [])


def listed(runs, *options, capsys):
    assert main(["runs", "--runs", str(runs), "--json", *options]) == 0
    return {each["name"]: each for each in json.loads(capsys.readouterr().out)}


@pytest.mark.usefixtures("no_job")
def test_the_list_has_the_runs_of_a_folder_the_newest_first(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    a_run(runs / "a", END | {"seconds": 12.0, "ended": "2026-11-20T22:10:15+0000"})
    a_run(runs / "b", program=["python", "train.py"], pid=os.getpid(), started=time_text(0))
    a_run(runs / "c", pid=1 << 30)  # `ringcomm run` was killed
    for number, name in enumerate("abc"):
        then = time.time() + number
        os.utime(runs / name / "run.json", (then, then))
    (runs / "link").symlink_to(runs / "a")
    (runs / "empty").mkdir()
    found = listed(runs, capsys=capsys)
    assert list(found) == ["c", "b", "a"]
    assert [each["state"] for each in found.values()] == ["lost", "running", "failed"]
    assert found["a"]["exit_code"] == 3
    assert found["a"]["folder"] == "runs/a"
    assert list(listed(runs, "-n", "2", capsys=capsys)) == ["c", "b"]
    assert main(["runs"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split(maxsplit=3) == ["a", "failed", "2", "rank 1 failed, exit 3, after 12 s"]


@pytest.mark.parametrize(
    ("job", "page", "state"),
    [
        ("1c0e", {"is_paused": True}, "paused"),
        ("1c0e", {"is_paused": False}, "running"),
        ("1c0e", {"is_paused": True, "state": PageState.LEFT}, "running"),
        ("1d00", {"is_paused": True}, "running"),
    ],
)
def test_a_live_run_is_paused_as_the_status_pages_of_its_ranks_say(job, page, state, tmp_path):
    folder = a_run(tmp_path / "a", pid=os.getpid(), started=time_text(0))
    page = {"job": job, "rank": 0, "state": PageState.RUNNING} | page
    samples = [RankSample(1, page, [], [], Process(0.0, 0))]
    run = KnownRun(str(folder.path), "a", True, ("1c0e",))
    assert facts_of(run, samples=samples).state == state


@pytest.mark.usefixtures("no_job")
def test_a_live_run_lists_how_many_are_left_by_what_guardians_and_ranks_record(tmp_path, capsys):
    folder = a_run(tmp_path / "a", ranks=4, pid=os.getpid(), started=time_text(0))
    (folder.path / "guardian-0").write_bytes(b"watches 1\nreport 1 137 killed 5 2\nx\n")
    (folder.path / "rank-2.end").write_bytes(b"began\nexit 000\n")
    (folder.path / "rank-3.end").write_bytes(b"began\n")
    found = listed(tmp_path, capsys=capsys)["a"]
    assert (found["ranks"], found["live_ranks"]) == (4, 2)
    assert main(["runs", "--runs", str(tmp_path)]) == 0
    assert " running  2 of 4  " in capsys.readouterr().out


def test_of_a_run_that_is_ending_it_is_not_said_that_its_ranks_are_yet_to_come(tmp_path):
    folder = a_run(tmp_path / "a", pid=os.getpid(), started=time_text(0))
    run = KnownRun(str(folder.path), "runs/a", True)
    assert why_not_live(run) == "no rank of the run runs/a is through ringcomm.init() on this host"
    (folder.path / "rank-0.end").write_bytes(b"began\nleft\nexit 000\n")
    assert "through ringcomm.init()" in why_not_live(run)
    (folder.path / "guardian-0").write_bytes(b"watches 1\nreport 1 137 killed 5 2\nx\n")
    assert why_not_live(run).startswith("all ranks of the run runs/a have ended, ")


@pytest.mark.usefixtures("no_job")
def test_a_list_of_the_dashboard_says_what_was_lost_and_who_lives(tmp_path, monkeypatch):
    lost = {"code": 0, "what": "completed", "rank": None, "lost": {"1": "raised ValueError"}}
    a_run(tmp_path / "a", END | lost | {"seconds": 12.0})
    live = a_run(tmp_path / "b", ranks=3, pid=os.getpid(), started=time_text(0))
    (live.path / "guardian-0").write_bytes(b"watches 1\nreport 1 137 killed 5 2\nx\n")
    rows = AllRuns(tmp_path, None, LiveRanks()).listing()["runs"]
    found = {each["name"]: (each["state"], each["ranks"], each["how"]) for each in rows}
    assert found == {"a": ("completed", "2", LOST), "b": ("running", "2 of 3", "")}
    monkeypatch.setattr("ringcomm.launch.watch.find_runs._is_paused", lambda *_: True)
    monkeypatch.setattr(LiveRanks, "sample", lambda _: [None])
    monkeypatch.setattr("ringcomm.launch.dashboard.all_runs.known_runs", lambda *_: [
        KnownRun(str(live.path), "b", True)
    ])  # fmt: skip
    (row,) = AllRuns(tmp_path, None, LiveRanks()).listing()["runs"]
    assert (row["state"], row["is_live"]) == ("paused", True)


@pytest.mark.usefixtures("no_job")
def test_a_pid_that_is_another_process_s_now_is_no_sign_of_life(tmp_path, capsys):
    folder = a_run(tmp_path / "a", pid=os.getpid())
    os.utime(folder.path / "run.json", (1, 1))  # before this process began
    assert listed(tmp_path, capsys=capsys)["a"]["state"] == "lost"


@pytest.mark.usefixtures("no_job")
def test_an_empty_list_says_so(tmp_path, capsys):
    assert main(["runs", "--runs", str(tmp_path / "none")]) == 1
    assert "there is no run in " in capsys.readouterr().err


LINES = [
    '{"time": 1.5, "step": 1, "loss": 0.5, "acc": 0.1}',
    '{"time": 1.5, "step": 2, "loss": 0.125, "train/loss": 9.0}',
    '{"time": 1.5, "step": 3, "loss": "nan"}',
    '{"time": 1.5, "step": 4, "a\\"loss": -7.0, "text": " \\"loss\\": 3"}',
    '{"loss": 2.5e-1}',
    '{"loss": 1e999, "acc": 0.3}',
    '{"loss": --}',
    '{"loss": 0.01',  # is written at the moment
]


def test_the_last_and_the_best_value_of_a_metric_are_those_of_whole_lines(tmp_path, monkeypatch):
    folder = a_run(tmp_path / "a")
    assert metric_of(folder, "loss", best="min") is None
    (folder.path / "metrics.jsonl").write_text("\n".join(LINES))
    assert metric_of(folder, "acc", best="max") == MetricValues(0.3, 0.3)
    monkeypatch.setattr("ringcomm.launch.watch.find_runs._BLOCK", 70)  # a line has up to 65 bytes
    assert metric_of(folder, "loss", best="min") == MetricValues(0.25, 0.125)
    assert metric_of(folder, "loss", best="max") == MetricValues(0.25, 0.5)
    assert metric_of(folder, "lr", best="max") is None


@pytest.mark.usefixtures("no_job")
def test_metrics_behind_a_link_do_not_count(tmp_path, capsys):
    folder = a_run(tmp_path / "a")
    (tmp_path / "target").write_text("\n".join(LINES))
    (folder.path / "metrics.jsonl").symlink_to(tmp_path / "target")
    assert main(["runs", "--runs", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    assert f"{folder.path}/metrics.jsonl is a link: it does not count" in shown.err
    assert '"last": 0' not in shown.out
