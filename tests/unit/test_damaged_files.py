"""Files of ours of which a bit or the end has changed are not used, or are named.

test_elastic_commit_file.py has kept commits, test_ps_checkpoint.py the manifests of servers'
checkpoints, and with_torch/test_checkpoint.py those of torch.
"""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from harness import at_length
from loopback import LoopbackHub
from planted_files import damaged, in_time
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm._core import StatusPage
from ringcomm._version import __version__
from ringcomm.collectives.measured_times import TimeTable
from ringcomm.config import Settings
from ringcomm.engine.api import tuning_files
from ringcomm.engine.progress.timeline import Timeline
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.gpu.kernels import kernel_cache
from ringcomm.launch import run, run_rank
from ringcomm.launch.dashboard.metrics import MetricReader
from ringcomm.launch.dashboard.source import Source, Viewer
from ringcomm.launch.job import hosts, local_job
from ringcomm.launch.job.run_folder import RunFolder
from ringcomm.launch.job.verdict import JobEnding, judge_ending
from ringcomm.launch.watch import other_hosts, timeline_command, top
from ringcomm.launch.watch.find_ranks import Ranks, _sample
from ringcomm.status.page_enums import OpState, PageState

N_FLIPS, N_CUTS = at_length([1500, 200], [100, 15])


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """Let watchers find no rank of this host: to look through /proc takes 3 ms."""
    monkeypatch.setattr(Ranks, "search", lambda self: None)


def copies_of(path):
    """Write damaged copies to a file; yield the bytes of each; put the whole one back."""
    whole = path.read_bytes()
    for data in damaged(whole, N_FLIPS, N_CUTS):
        path.write_bytes(data)
        with in_time():
            yield data
    path.write_bytes(whole)


# --- with a checksum: nothing else is read --------------------------------------------------------
def test_a_tuning_table_is_used_as_it_was_written_or_not_at_all(tmp_path, caplog):
    times = {"allreduce": {8: {"ring": 1.5e-6, "direct": 3.25e-6}, 64: {"ring": 2.0e-6}}}
    table = TimeTable("2 hosts x 1 rank", "threads", __version__, times)
    settings, wire = Settings(tuning=str(tmp_path)), LoopbackHub(2).transport(0)
    path = tuning_files.save(settings, table)
    for data in copies_of(path):
        caplog.clear()
        assert tuning_files.load(settings, wire) == "", data
        [record] = caplog.records
        assert record.getMessage().startswith(f"{path} is ignored: "), data
    assert TimeTable.loads(tuning_files.load(settings, wire)).seconds == times


def test_a_report_of_a_rank_of_run_is_read_whole_or_named(tmp_path):
    path = run_rank.report_path(tmp_path, 0)
    run_rank._write(path, run_rank.RankReport(result=pickle.dumps([1.5, "x"])))
    for _ in copies_of(path):
        with pytest.raises(RingcommError, match=r"rank-0, in which rank 0 reports, has changed"):
            run._read(tmp_path, 0)
    assert pickle.loads(run._read(tmp_path, 0).result) == [1.5, "x"]


def test_a_kernel_of_which_a_bit_has_changed_is_compiled_anew(tmp_path):
    def compiled(code):
        return kernel_cache.compiled_once(tmp_path, ("source",), lambda: code)

    compiled(b"good" * 9)
    [path] = tmp_path.iterdir()
    for data in copies_of(path):
        assert compiled(b"anew") == b"anew", data
        assert path.read_bytes() != data


@pytest.mark.parametrize("name", ["server-0.json", "server-0.data-2-0", "server-1.json"])
def test_of_a_damaged_part_of_a_checkpoint_the_one_before_is_used(name, tmp_path, caplog):
    def save(value):
        def body(rank):
            t = ps.table("w", 300, updater=ps.optim.Add(), block_nbytes=400)
            t.push(np.full(300, value, np.float32)).wait()
            ps.save(tmp_path, background=False)

        run_workers(1, body, 2)

    save(1.0)
    save(2.0)
    path = tmp_path / "save-00000002" / name
    for data in copies_of(path):
        caplog.clear()
        values = ps.load_state_dict(tmp_path)["w"]
        assert (values == 1).all(), data
        assert name in caplog.text
    assert (ps.load_state_dict(tmp_path)["w"] == 2).all()


# --- without one: no error but ours, and the file is named ----------------------------------------
def a_rank():
    page = StatusPage.create("job-9", "h1", 1, 2, 0, 5)
    facts = {**page.snapshot(), "op_state": int(OpState.RUNNING), "state": int(PageState.RUNNING)}
    steps = [(n, tuple(range(n, n + 5)), (0,) * 4) for n in range(25)]
    return replace(
        _sample(page, 10**9, {}),
        page=facts,
        scalars=[("loss", 3, float("nan")), ("busy_s", -1, 2.5)],
        events=[(5, "epoch 2 begins")],
        steps=steps,
    )


def test_what_a_host_has_reported_is_shown_or_named(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create({"ranks": 2}, {})
    rank = a_rank()
    folder.put("rank-1.at", f"{rank.page['pid']} h1 77\n".encode())
    content = json.loads(other_hosts._content("h1", [rank]))
    content["traffic"] = [["10.0.0.1", "10.0.0.2", 5, 1, 9]]
    path = folder.path / "host-h1.json"
    path.write_text(json.dumps(content))
    n_named = 0
    for data in copies_of(path):
        jobs = top.Jobs(str(folder.path))
        jobs.look()
        samples = jobs.look()
        for shown in (top._plain(jobs, samples, top._by_rank(samples)), *jobs.problems):
            assert shown.replace("\n", "").isprintable(), data
        json.dumps(Source(folder).news(Viewer(), 0.0), allow_nan=False)
        n_named += any(str(path) in each for each in jobs.problems)
    assert n_named > N_CUTS


RECORDS = {
    "rank-0.at": b"4711 h1 123456\n",
    "rank-0.end": b"began\nrole worker\nleft\nexit 003\n",
    "guardian-0": b"watches 1\nnote 4\nabc\nreport 1 3 own 1795987656842555840 4\nx r\nend\n",
    "run.json": b'{"ranks": 2, "hosts": ["h1:1", "h2:1"]}',
    "end.json": json.dumps(
        {"code": 3, "what": "failed", "rank": 1, "report": "x", "exit_codes": {"0": 0, "1": 3}}
    ).encode(),
}


def read_all(folder):
    """Return all that is read of a run, as the supervisor and the dashboard do."""
    ends, ranks, guardians = folder.ends(), folder.ranks(), folder.guardians()
    failures = tuple(each for guardian in guardians for each in guardian.failures)
    ending = JobEnding(size=2, ends=ends, seen=ranks.keys(), failures=failures, launcher_code=1)
    return {
        "guardian-0": guardians,
        "rank-0.at": ranks,
        "rank-0.end": ends,
        "end.json": folder.end(),
        "run.json": folder._n_ranks(),
        "verdict": judge_ending(ending).code,
    }


@pytest.mark.parametrize("name", RECORDS)
def test_records_of_a_run_say_something_of_their_kind_or_are_named(name, tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create({}, {})
    for each, content in RECORDS.items():
        (folder.path / each).write_bytes(content)
    before = RunFolder(folder.path)
    whole = read_all(before)
    assert before.problems == {}
    for data in copies_of(folder.path / name):
        again = RunFolder(folder.path)
        found = read_all(again)
        state = Source(again).news(Viewer(), 0.0)
        json.dumps(state, allow_nan=False)
        assert local_job._verdict(again, 1).what
        assert {*again.problems} <= {name, *(RECORDS if name == "run.json" else ())}, data
        others = {key: value for key, value in found.items() if key not in (name, "verdict")}
        if name != "run.json":  # it says which ranks there are
            assert all(value == whole[key] for key, value in others.items()), data
    assert read_all(RunFolder(folder.path)) == whole


METRICS = (
    {"time": 1796.25, "step": 3, "loss": 0.123456789, "lr": 0.1},
    {"time": 1797.5, "step": 4, "loss": "nan", "long name/\u00fc": -5},
    {"time": 1798.0, "loss": 2.5e-08},
)


def test_what_rc_log_has_written_is_shown_or_named(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create({"ranks": 1}, {})
    path = folder.path / "metrics.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in METRICS))
    whole = Source(folder).metrics(MetricReader(), 60.0)
    n_points = sum(len(each["points"]) for each in whole)
    assert n_points == 5
    n_named = 0
    for data in copies_of(path):
        source, reader = Source(folder), MetricReader()
        found = source.metrics(reader, 60.0)
        json.dumps(found, allow_nan=False)
        state = json.dumps(source.state(), allow_nan=False)
        is_named = path.name in state
        n_named += is_named
        n_found = sum(len(each["points"]) for each in found)
        # A name or a number may be another one, and a last line without its end may yet get it.
        is_cut = data.count(b"\n") < len(METRICS)
        assert is_named or n_found >= n_points or is_cut, data
    assert n_named > N_FLIPS // 4


def test_a_record_that_was_cut_off_is_no_good_end(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create({"ranks": 1}, {})
    for end in range(len(b"began\nexit 003\n")):
        (folder.path / "rank-0.end").write_bytes(b"began\nexit 003\n"[:end])
        assert {each.code for each in folder.ends().values()} <= {None}


def test_a_timeline_is_summed_up_as_far_as_it_is_one(tmp_path, capsys):
    timeline = Timeline(tmp_path / "timeline", 0)
    for _ in range(3):
        timeline.begin("allreduce[w]", 100).end("")
    timeline.close()
    path = tmp_path / "timeline.0.json"
    merged = tmp_path / "all.json"
    for data in copies_of(path):
        codes = [
            timeline_command.main(["summary", str(path)]),
            timeline_command.main(["merge", str(path), "-o", str(merged)]),
        ]
        assert {*codes} <= {0, 1}
        said = capsys.readouterr()
        assert all(str(path) in line for line in said.err.splitlines()), data
        assert said.out.replace("\n", "").isprintable(), data
        if codes == [0, 0]:
            json.loads(merged.read_text(), parse_constant=pytest.fail)


def test_a_file_of_parameters_is_read_or_named(tmp_path, monkeypatch):
    path = tmp_path / "params.toml"
    path.write_text('lr = 0.25\nname = "x"\nbatch = 64\ndeep = true\n')
    monkeypatch.setenv("RINGCOMM_PARAMS", str(path))
    said = set()
    for _ in copies_of(path):
        try:
            found = rc.Params(lr=0.5, name="a", batch=1, deep=False)
        except ConfigError as error:
            said.add(str(error).partition(": ")[0])
        else:
            assert [type(found[name]) for name in found] == [float, str, int, bool]
    assert said == {str(path)}
    for text in ("lr = nan", "lr = inf", "lr = 1" + "0" * 400, "x = " + "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ConfigError, match=str(path)):
            rc.Params(lr=0.5)


def test_a_host_file_is_read_or_an_error_says_what_is_wrong(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"h1 slots=4\nh2:2 # the second\ngpu[01-03]\n")
    for data in copies_of(path):
        try:
            found = hosts.parse_host_file(data.decode())
        except (ConfigError, UnicodeDecodeError):  # the command names the file
            continue
        assert all(each.places is None or each.places > 0 for each in found)
