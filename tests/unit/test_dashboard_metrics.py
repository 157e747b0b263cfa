"""The dashboard reads metrics by blocks, and sends no more of them than a page shows."""

import itertools
import json
import os
import tracemalloc

import pytest
from other_users import IS_ROOT, OTHER

from ringcomm.launch.dashboard import metrics
from ringcomm.launch.dashboard.metrics import MetricReader, thinned
from ringcomm.launch.dashboard.source import Source
from ringcomm.launch.job.run_folder import RunFolder

FOREVER_S = 1e9


def read(reader, path, rank=0, seconds=FOREVER_S):
    return reader.read([(path.name, rank)], RunFolder(path.parent).open_metrics, seconds)


def points_of(found, name):
    return [tuple(point) for each in found if each["name"] == name for point in each["points"]]


@pytest.mark.parametrize("n", [0, 1, 2, 7, 8, 9, 4000, 4001, 100_003])
@pytest.mark.parametrize("most", [1, 2, 8, 4000])
def test_what_is_left_of_points_is_even_and_has_the_last_one(n, most):
    points = [(step, float(step)) for step in range(n)]
    left = thinned(points, most)
    assert len(left) <= most
    assert len(left) > min(n, most) / 2 or n == 0
    assert left[-1:] == points[-1:]
    assert len({b[0] - a[0] for a, b in itertools.pairwise(left)}) <= 1


def test_what_is_new_comes_once_and_whole(tmp_path):
    path, reader = tmp_path / "metrics.jsonl", MetricReader()
    assert read(reader, path) == []
    path.write_text('{"time": 1.5, "step": 3, "loss": 0.5, "lr": 0.1}\n{"step": 4, "lo')
    assert read(reader, path, rank=7) == [
        {"rank": 7, "name": "loss", "points": [(3, 0.5)]},
        {"rank": 7, "name": "lr", "points": [(3, 0.1)]},
    ]
    assert read(reader, path) == []
    with path.open("a") as file:
        file.write('ss": 0.25}\n')
    assert points_of(read(reader, path), "loss") == [(4, 0.25)]


def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read(MetricReader(), tmp_path / "metrics.jsonl") == []


def test_points_without_a_step_are_counted_also_those_that_are_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 1 << 10)
    monkeypatch.setattr(metrics, "POINTS", 50)
    path, reader = tmp_path / "metrics.jsonl", MetricReader()
    path.write_text("".join(f'{{"loss": {i}}}\n' for i in range(5000)))
    found = points_of(read(reader, path), "loss")
    assert 50 <= len(found) < 200
    assert all(step == value for step, value in found)
    assert found[-1] == (4999, 4999)


def test_a_name_that_is_rare_loses_no_point(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 1 << 12)
    path, reader = tmp_path / "metrics.jsonl", MetricReader()
    records = [{"step": i, "loss": 1.0} | ({"val": i} if i % 100 == 0 else {}) for i in range(9000)]
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    found = read(reader, path)
    assert [step for step, _ in points_of(found, "val")] == list(range(0, 9000, 100))


def test_a_large_file_takes_no_more_memory_than_its_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 1 << 14)
    monkeypatch.setattr(metrics, "POINTS", 100)
    path, reader = tmp_path / "metrics.jsonl", MetricReader()
    path.write_text("".join(f'{{"step": {i}, "loss": 0.5, "lr": 0.125}}\n' for i in range(30_000)))
    tracemalloc.start()
    try:
        found = read(reader, path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert points_of(found, "loss")[-1] == (29_999, 0.5)
    assert path.stat().st_size > 1_000_000
    assert peak < 600_000, peak


def test_reading_pauses_at_its_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 1 << 10)
    paths = [tmp_path / "metrics.jsonl", tmp_path / "metrics-1.jsonl"]
    for path in paths:
        path.write_text("".join(f'{{"step": {i}, "loss": 1.0}}\n' for i in range(1000)))
    files = [(path.name, rank) for rank, path in enumerate(paths)]
    open_file = RunFolder(tmp_path).open_metrics
    reader, found, n_calls = MetricReader(), [], 0
    while not n_calls or reader.is_behind:
        found += reader.read(files, open_file, seconds=0)
        n_calls += 1
    assert n_calls > 20
    steps = [step for step, _ in points_of(found, "loss")]
    assert (steps.count(0), steps.count(999)) == (2, 2)


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"3",
        b"null",
        b"{",
        b"\xff",
        b"[" * 100_000,
        b'{"loss": ' + b"9" * 5000 + b"}",
        b'{"loss\xff": 2.0}',
        b"x" * 5000,
    ],
)
def test_lines_that_are_no_records_are_passed_over(line, tmp_path, monkeypatch):
    monkeypatch.setattr(metrics, "BLOCK", 1 << 10)
    path, reader = tmp_path / "metrics.jsonl", MetricReader()
    good = b'{"step": 1, "loss": 2.0}\n'
    path.write_bytes(good + line + b"\n" + good)
    assert points_of(read(reader, path), "loss") == [(1, 2.0), (1, 2.0)]
    assert "that rc.log() has not written so" in reader.problems[path.name]


def test_a_value_that_is_no_number_leaves_a_gap(tmp_path):
    path, reader = tmp_path / "metrics.jsonl", MetricReader()
    path.write_text(
        '{"a": "nan", "b": NaN, "c": Infinity, "d": {"e": 1}, "f": true, "step": NaN}\n'
    )
    found = read(reader, path)
    assert [each["points"] for each in found] == [[(0, None)]] * 5
    json.dumps(found, allow_nan=False)
    assert reader.problems == {path.name: "has 1 line that rc.log() has not written so"}


@pytest.mark.parametrize("huge", ["9" * 400, "-" + "9" * 400, "1e400"])
def test_a_number_that_no_page_can_show_leaves_a_gap(huge, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "a": {huge}}}\n{{"step": {huge}, "a": 2}}\n')
    assert points_of(read(MetricReader(), path), "a") == [(1, None), (1, 2)]


@pytest.mark.parametrize("what", ["a link", "a loop", "of another user", "closed to this user"])
def test_a_file_that_does_not_count_is_named_and_the_others_are_shown(what, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.create({"ranks": 2}, {})
    path, other = folder.path / "metrics.jsonl", folder.path / "metrics-1.jsonl"
    other.write_text('{"loss": 0.5}\n')
    secret = tmp_path / "secret"
    secret.write_text('{"key": 5}\n')
    if what == "a link":
        path.symlink_to(secret)
    elif what == "a loop":
        path.symlink_to(path)
    elif what == "closed to this user" and IS_ROOT:
        pytest.skip("root may read all")
    else:
        secret.rename(path)
        if what == "of another user" and IS_ROOT:
            os.chown(path, OTHER, OTHER)
        else:
            path.chmod(0)
    monkeypatch.setattr("ringcomm.launch.watch.find_ranks.Ranks.sample", lambda *_: [])
    source = Source(folder)
    found = source.metrics(MetricReader(), FOREVER_S)
    assert found == [{"rank": 1, "name": "loss", "points": [(0, 0.5)]}]
    assert "metrics.jsonl " in source.state()["late"]


def test_a_run_that_is_being_removed_shows_what_is_left(tmp_path):
    gone, there = tmp_path / "metrics.jsonl", tmp_path / "metrics-1.jsonl"
    # `gone` was listed, and is gone when it is opened.
    there.write_text('{"time": 1.5, "rank": 0.25}\n')
    files = [(gone.name, 0), (there.name, 1)]
    found = MetricReader().read(files, RunFolder(tmp_path).open_metrics, FOREVER_S)
    assert found == [
        {"rank": 1, "name": "rank", "points": [(0, 0.25)]}
    ]  # what the program calls so
