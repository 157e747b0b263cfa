"""`ringcomm timeline` merges what ranks recorded, with aligned clocks, and sums it up."""

import json

import pytest

from ringcomm.engine.progress.timeline import Timeline
from ringcomm.launch.watch.timeline_command import main
from ringcomm.launch.watch.timelines import clock_offsets, merge, read_events, spans_of, summary


def recorded(rank, host, operations, ahead_us=0.0):
    """Return the events of a rank; operations: label, begin and end."""
    events = [
        {"pid": rank, "tid": 0, "ph": "M", "ts": 0.0, "name": "process_name",
         "args": {"name": f"rank {rank}", "host": host}},
    ]  # fmt: skip
    for label, begin, end in operations:
        events.append(
            {"pid": rank, "tid": 0, "ph": "B", "ts": begin + ahead_us, "name": label,
             "args": {"nbytes": 1000}}
        )  # fmt: skip
        if end is not None:
            events.append({"pid": rank, "tid": 0, "ph": "E", "ts": end + ahead_us})
    return events


def steps(late_us=0):
    return [("allreduce[w]", 1e6 + 1e4 * i + late_us, 1e6 + 1e4 * i + 5000) for i in range(20)]


def test_clocks_of_hosts_are_aligned_by_the_ends_of_collectives():
    events = [
        *recorded(0, "a", steps()),
        *recorded(1, "a", steps(3000)),
        *recorded(2, "b", steps(1000), ahead_us=7e5),
    ]
    hosts = {0: "a", 1: "a", 2: "b"}
    assert clock_offsets(hosts, spans_of(events)) == {"a": 0.0, "b": -7e5}
    spans = spans_of(merge(events))
    assert {round(span.end) for span in spans if span.number == 3} == {1_035_000}
    times = [event["ts"] for event in merge(events) if event["ph"] != "M"]
    assert times == sorted(times)


def test_clocks_that_cannot_be_compared_are_left_as_they_are():
    events = [*recorded(0, "a", steps()), *recorded(1, "b", [("send(dest=0)", 5.0, 9.0)])]
    assert clock_offsets({0: "a", 1: "b"}, spans_of(events)) == {"a": 0.0, "b": 0.0}


def test_the_summary_names_who_comes_last():
    events = [*recorded(0, "a", steps()), *recorded(1, "a", steps(3000))]
    text = summary(events)
    assert text.startswith("2 ranks, 40 operations in 0.2 s\n")
    (row,) = [line for line in text.splitlines() if line.endswith("allreduce[w]")]
    assert row.split()[:5] == ["40", "0.14", "3.50", "0.0", "1"]
    assert "(100%)" in row
    assert " 3.00  " in row  # ms late
    assert summary([]) == "no operation has ended"


def test_unnamed_operations_have_a_row_for_each_collective_shape_and_place():
    facts = {"nbytes": 8, "shape": "float32[2]", "at": "train.py:12"}
    there = facts | {"at": "train.py:30"}
    operations = [
        ("allreduce #1", facts), ("allreduce #2", facts), ("allreduce #3", there),
        ("allreduce #4 of Group([0, 1])", facts), ("barrier #5", {}), ("barrier #6", {}),
        ("allreduce[w #7]", facts), ("allgather #8", {"nbytes": 16}),
    ]  # fmt: skip
    events = [
        {"pid": rank, "tid": 0, "ph": ph, "ts": 10.0 * i + 5 * (ph == "E") + rank, "name": label,
         "args": args if ph == "B" else {}}
        for rank in range(2)
        for i, (label, args) in enumerate(operations)
        for ph in "BE"
    ]  # fmt: skip
    rows = summary(events).partition("\n\nrank")[0].splitlines()[3:]
    assert {tuple(row.split(maxsplit=7)[::7]): row.split()[4:6] for row in rows} == {
        ("4", "allreduce float32[2] at train.py:12"): ["1", "(100%)"],
        ("2", "allreduce float32[2] at train.py:30"): ["1", "(100%)"],
        ("2", "allreduce of Group([0, 1]) float32[2] at train.py:12"): ["1", "(100%)"],
        ("4", "barrier"): ["1", "(100%)"],
        ("2", "allreduce[w #7]"): ["1", "(100%)"],
        ("2", "allgather 16 B"): ["1", "(100%)"],
    }


def test_time_in_operations_that_overlap_counts_once():
    events = [
        {"pid": 0, "tid": tid, "ph": ph, "ts": ts, "name": name}
        for ts, ph, tid, name in [
            (0.0, "B", 1, "allreduce[a]"),
            (1e5, "B", 2, "allreduce[b]"),
            (3e5, "E", 2, ""),
            (4e5, "E", 1, ""),
            (8e5, "B", 1, "allreduce[c]"),
            (9e5, "B", 2, "allreduce[d]"),
            (9.5e5, "E", 1, ""),
            (1e6, "E", 2, ""),
        ]
    ]
    assert summary(events).splitlines()[-1].split()[:2] == ["0", "60%"]


def test_a_merged_file_is_json_with_an_end_for_each_operation(tmp_path, capsys):
    for rank in range(2):
        unfinished = [("barrier #7", 2e6, None)] if rank else []
        lines = [json.dumps(e) + ",\n" for e in recorded(rank, "a", steps() + unfinished)]
        cut = '{"pid": 0, "tid": 0, "ph": "B", "na' if rank else ""
        (tmp_path / f"timeline.{rank}.json").write_text("[\n" + "".join(lines) + cut)
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 0
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    kinds = [event["ph"] for event in events]
    assert (kinds.count("B"), kinds.count("E")) == (41, 41)
    assert events[-1]["args"] == {"outcome": "unfinished"}
    require_trace_event_format(events)
    assert main(["summary", str(tmp_path)]) == 0
    assert "allreduce[w]" in capsys.readouterr().out
    assert main(["summary", str(tmp_path / "none")]) == 1
    no_such = f"ringcomm timeline: {tmp_path / 'none'}: No such file or directory\n"
    assert capsys.readouterr().err == no_such
    assert read_events([b"]"]) == ([], 0)


def test_a_file_without_events_of_a_rank_is_named(tmp_path, capsys):
    lines = "\n".join(f"{json.dumps(event)}," for event in recorded(0, "a", steps()))
    (tmp_path / "timeline.0.json").write_text(f"[\n{lines}")
    (tmp_path / "timeline.1.json").touch()  # its rank was killed before it wrote anything
    merged = tmp_path / "timeline.all.json"
    assert main(["merge", str(tmp_path), "-o", str(merged)]) == 0
    capsys.readouterr()
    assert main(["summary", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("1 ranks, 20 operations")
    assert [line.partition(" has no events")[0] for line in shown.err.splitlines()] == [
        f"ringcomm timeline: {path}" for path in (tmp_path / "timeline.1.json", merged)
    ]


def test_what_ranks_record_is_in_the_format_of_perfetto_once_merged(tmp_path):
    for rank in range(2):
        timeline = Timeline(tmp_path / "timeline", rank)
        lanes = [timeline.begin(label, 100) for label in ("allreduce[w]", "barrier #1", "x")]
        with lanes[1].phase("agree"):
            pass
        for lane in lanes[:2]:
            lane.end("")
        timeline.begin("allreduce[w]", 100).end("")
        timeline.close()
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 0
    merged = json.loads((tmp_path / "all.json").read_text())
    require_trace_event_format(merged["traceEvents"])
    assert {event["ph"] for event in merged["traceEvents"]} == {"B", "E", "M", "X"}


def write_timelines(folder):
    for rank in range(2):
        lines = [json.dumps(each) for each in recorded(rank, "a", steps())]
        (folder / f"timeline.{rank}.json").write_text("[\n" + ",\n".join(lines))


def test_a_timeline_that_is_named_twice_counts_once(tmp_path, capsys):
    write_timelines(tmp_path)
    assert main(["summary", str(tmp_path)]) == 0
    once = capsys.readouterr().out
    twice = [str(tmp_path), str(tmp_path / "timeline.1.json"), f"{tmp_path}/../{tmp_path.name}"]
    assert main(["summary", *twice]) == 0
    assert capsys.readouterr().out == once


def test_a_run_is_meant_by_its_name(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("2026-11-20", "2026-11-21"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    write_timelines(tmp_path / "runs" / "2026-11-21")
    assert main(["summary", "2026-11-21"]) == main(["summary", "latest"]) == 0
    assert capsys.readouterr().out.count("2 ranks, 40 operations") == 2
    assert main(["summary", "2026"]) == 1
    assert "several begin with '2026'" in capsys.readouterr().err


def test_no_merged_file_takes_the_place_of_a_timeline(tmp_path, capsys):
    write_timelines(tmp_path)
    taken = tmp_path / "timeline.0.json"
    before = taken.read_text()
    assert main(["merge", str(tmp_path), "-o", str(taken)]) == 1
    assert "is one of the timelines that are merged" in capsys.readouterr().err
    assert taken.read_text() == before
    for _ in range(2):  # one that was merged before may be replaced
        assert main(["merge", str(tmp_path), "-o", str(tmp_path / "timeline.all.json")]) == 0


def test_a_summary_whose_reader_has_gone_is_left_to_the_caller(tmp_path, monkeypatch):
    def write(_):
        raise BrokenPipeError

    write_timelines(tmp_path)
    monkeypatch.setattr("sys.stdout.write", write)
    with pytest.raises(BrokenPipeError):  # cli.main() ends the program as `top --once | head` does
        main(["summary", str(tmp_path)])


def require_trace_event_format(events):
    """Fail unless Perfetto would show these: the fields and rules of the Trace Event Format.

    Of that format are: B and E in pairs on each thread, with times in microseconds that do not go
    back; X, with a duration; and M, whose names it lists.
    """
    open_ones, latest = {}, {}
    for event in events:
        row = event["pid"], event["tid"]
        assert all(type(each) is int for each in row)
        assert event["ph"] in ("B", "E", "M", "X")
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        assert isinstance(event.get("args", {}), dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name")
            assert isinstance(event["args"], dict)
            continue
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["name"]
            continue
        assert event["ts"] >= latest.get(row, 0)
        latest[row] = event["ts"]
        if event["ph"] == "B":
            assert isinstance(event["name"], str)
            assert event["name"]
            open_ones[row] = open_ones.get(row, 0) + 1
        else:
            open_ones[row] -= 1
            assert open_ones[row] >= 0, "an end without a beginning"
    assert not any(open_ones.values()), "an operation without an end"
