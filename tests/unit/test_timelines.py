"""`ringcomm timeline` merges what ranks recorded, with aligned clocks, and sums it up."""

import json

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
    assert main(["summary", str(tmp_path)]) == 0
    assert "allreduce[w]" in capsys.readouterr().out
    assert main(["summary", str(tmp_path / "none")]) == 1
    assert read_events("]") == []
