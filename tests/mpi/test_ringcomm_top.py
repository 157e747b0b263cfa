"""`ringcomm top` and rc.log() with real jobs: what is shown of them, also while they hang."""

import contextlib
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass, field, replace

import pytest
from find_ranks_of_a_job import ranks_in
from harness import (
    BIN,
    HANG_S,
    at_length,
    finish_job,
    job_environment,
    run_command,
    run_script,
    start_job,
    wait_until,
)

from ringcomm.launch.watch.diagnosis import History, late_rank
from ringcomm.launch.watch.rank_rows import (
    AS_RANK,
    COLUMNS,
    Process,
    RankSample,
    as_json,
    latest_events,
    row_of,
)
from ringcomm.launch.watch.top import Jobs, _by_rank, _rich, _shown_columns
from ringcomm.status.page_enums import Ending

JOB = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc
rc.init()
rc.barrier()
print("job", flush=True)
rc.log(step=17, loss=0.25 + rc.rank(), **{"lr": 0.1})
rc.note_event("epoch 2 begins")
if rc.rank() == 1:
    open("slow", "w").close()
    while not os.path.exists("go on"):
        time.sleep(0.02)  # nobody tells of a file
rc.allreduce(np.ones(250_000, np.float32), name="layer3.weight")
rc.barrier()
"""


def top(*arguments):
    return run_command([BIN / "ringcomm", "top", *arguments], env=job_environment())


def facts_of(folder):
    """Return what top says of the job that runs in this folder, by rank."""
    return {rank: as_json(each) for rank, each in ranks_in(folder).items()}


@contextlib.contextmanager
def job_that_hangs(folder):
    """Let a job of 3 ranks, of which 2 wait for rank 1, run until there is a file `go on`."""
    (folder / "script.py").write_text(JOB)
    job = start_job(3, folder / "script.py", cwd=folder)
    wait_until((folder / "slow").exists, "rank 1 is not there")
    wait_until(
        lambda: (
            [facts_of(folder).get(rank, {}).get("state") for rank in range(3)]
            == ["waits", "computes", "waits"]
        ),
        lambda: top("--json").stdout,
    )
    yield
    (folder / "go on").touch()
    assert finish_job(job).code == 0


@pytest.fixture
def hanging(tmp_path):
    """The folder of a job that hangs."""
    with job_that_hangs(tmp_path):
        yield tmp_path


def shoot(job, target):
    from rich.console import Console

    jobs = Jobs(job)
    before = _by_rank(jobs.look())
    time.sleep(1)  # the rates are of a second
    console = Console(record=True, width=130, file=io.StringIO())
    console.print(_rich(jobs, jobs.look(), before))
    console.save_svg(f"{target}/top.svg", title="ringcomm top")


ROW = r"waits.*17.*allreduce\[layer3\.weight\]"
TERMINALS = {
    "with all that xterm has": ({}, ROW),
    "that is dumb": ({"TERM": "dumb"}, ROW),  # a table after the other
    "that Rich takes for none": ({"TTY_COMPATIBLE": "0"}, ROW),  # likewise
    "that has no ellipsis": ({"PYTHONIOENCODING": "latin-1", "COLUMNS": "60"}, r"wa\S*.*17.*\?"),
}


class Viewer:
    """A `ringcomm top` at a terminal."""

    def __init__(self, job, terminal):
        self.ours, theirs = os.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [BIN / "ringcomm", "top", job, "--interval", "0.1"],
            env=job_environment({"COLUMNS": "200", "LINES": "50", "TERM": "xterm"} | terminal),
            stdin=subprocess.DEVNULL,
            stdout=theirs,
        )
        os.close(theirs)

    def read_until(self, row):
        """Read what it shows until this has come, or its end."""
        with contextlib.suppress(OSError):  # the end of a terminal
            while piece := os.read(self.ours, 1 << 16).decode(errors="replace"):
                self.text += piece
                if row is not None and re.search(row, self.text):
                    return


@dataclass
class Seen:
    """What is shown of a job that hangs: by number of its rank, as text, and at terminals."""

    facts: dict
    text: str
    stopped: dict  # while rank 1 is
    tables: dict = field(default_factory=dict)  # by terminal, with the exit code


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What `ringcomm top` shows of a job that hangs, in which a rank is stopped, and of its end."""
    pytest.importorskip("rich", reason="the core is tested without rich, too")
    folder = tmp_path_factory.mktemp("seen")
    with job_that_hangs(folder):
        pids = {each["pid"] for each in facts_of(folder).values()}
        shown = [each for each in json.loads(top("--json").stdout) if each["pid"] in pids]
        facts = {each["rank"]: each for each in shown}
        job, pid = facts[0]["job"], facts[1]["pid"]
        text = top("--once", "--interval", "0.3", job).stdout
        if target := os.environ.get("SCREENSHOTS"):  # docs/images
            shoot(job, target)
        os.kill(pid, signal.SIGSTOP)
        wait_until(lambda: "stopped for" in facts_of(folder)[1]["state"], "it does not seem so")
        found = Seen(facts, text, facts_of(folder)[1])
        os.kill(pid, signal.SIGCONT)
        wait_until(lambda: facts_of(folder)[1]["state"] == "computes", "it does not go on")
        viewers = {name: Viewer(job, terminal) for name, (terminal, _) in TERMINALS.items()}
        for name, (_, row) in TERMINALS.items():
            viewers[name].read_until(row)
    for name, viewer in viewers.items():
        viewer.read_until(None)
        os.close(viewer.ours)
        found.tables[name] = viewer.text, viewer.process.wait(HANG_S)
    return found


def test_a_job_that_hangs_is_shown_without_its_help_and_a_stopped_rank_as_such(seen):
    facts, text = seen.facts, seen.text
    assert facts[0]["operation"] == "allreduce[layer3.weight]"
    assert facts[1]["operation"] is None
    assert facts[2]["operation_s"] > 0
    assert facts[0]["memory_nbytes"] > 1 << 20
    assert [facts[rank]["scalars"] for rank in range(3)] == [
        {"loss": 0.25 + rank, "lr": 0.1} for rank in range(3)
    ]
    assert facts[1]["events"] == ["epoch 2 begins"]
    assert {facts[rank]["step"] for rank in range(3)} == {17}
    assert re.search(rf"job {facts[0]['job']}: 3 of 3 ranks live on", text)
    assert re.search(r"^1 +\d+ +computes +17 +0% +0\.0 ", text, re.MULTILINE), text
    row = r"^0 +\d+ +waits +17 +allreduce\[layer3\.weight\] +\d+\.\d s +100% +0\.0 .*loss=0\.25 lr"
    assert re.search(row, text, re.MULTILINE), text
    assert "rank 2: epoch 2 begins" in text
    assert seen.stopped["is_bad"]


@pytest.mark.parametrize("terminal", TERMINALS)
def test_the_live_table_goes_on_until_the_job_is_over_at_a_terminal(terminal, seen):
    text, code = seen.tables[terminal]
    assert code == 0
    assert re.search(TERMINALS[terminal][1], text)
    assert "ringcomm top: all jobs are over" in text


@pytest.mark.at_length  # the table shows the same numbers
def test_prometheus_gets_the_same_numbers(hanging):
    pytest.importorskip("prometheus_client", reason="the core is tested without it, too")
    job = facts_of(hanging)[0]["job"]
    served = subprocess.Popen(
        [BIN / "ringcomm", "top", job, "--prometheus-port", "0"],
        env=job_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = served.stdout.readline().strip()
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            text = answer.read().decode()
    finally:
        served.send_signal(signal.SIGINT)
        served.communicate(timeout=60)
    from prometheus_client.parser import text_string_to_metric_families

    found = [each for family in text_string_to_metric_families(text) for each in family.samples]
    values = {(s.name, s.labels["rank"], s.labels.get("name", "")): s.value for s in found}
    here = {"job": job, "host": facts_of(hanging)[0]["host"]}
    assert all(here.items() <= each.labels.items() for each in found)
    shape = [values["ringcomm_in_operation", str(rank), ""] for rank in range(3)]
    assert shape == [1.0, 0.0, 1.0]
    assert values["ringcomm_steps_total", "2", ""] == 17.0
    assert values["ringcomm_scalar", "1", "loss"] == 1.25
    assert served.returncode == 0


def test_without_a_job_there_is_a_word_of_it():
    done = top("--once", "no such job")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("ringcomm top: no run and no live job is called 'no such job'; ")


def test_metrics_are_in_the_folder_of_the_run(tmp_path):
    (tmp_path / "train.py").write_text(
        "import numpy as np\nimport ringcomm as rc\n"
        "class Writer:\n"
        "    def add_scalar(self, name, value, step): print(name, value, step, flush=True)\n"
        "class Run:\n"
        "    def log(self, values, step): print(values, step, flush=True)\n"
        "class Mlflow:\n"
        "    def log_metric(self, name, value, step): print('mlflow', name, flush=True)\n"
        "rc.init()\n"
        "for tracker in (Writer(), Run(), Mlflow()): rc.log_to(tracker)\n"
        "rc.log(step=np.int64(1), loss=np.float32(0.5))\n"
        "rc.log({'train/loss': float('nan')}, acc=1)\n"
        "wrong = (lambda: rc.log(loss='low'), lambda: rc.log(step=1.5), lambda: rc.log_to(3))\n"
        "for call in wrong:\n"
        "    try: call()\n"
        "    except TypeError as error: print(error, flush=True)\n"
    )
    done = run_command(
        [BIN / "ringcomm", "run", "--run-folder", "run", "-np", "2", "train.py"],
        env=job_environment({"TMPDIR": str(tmp_path)}),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done
    for name in ("metrics.jsonl", "metrics-1.jsonl"):
        lines = [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]
        assert all(line.pop("time") > 1e9 for line in lines)
        assert lines == [{"step": 1, "loss": 0.5}, {"train/loss": "nan", "acc": 1.0}]
    assert (tmp_path / "run" / "rank-0.log").read_text().splitlines() == [
        "loss 0.5 1",
        "{'loss': 0.5} 1",
        "mlflow loss",
        "train/loss nan 2",
        "acc 1.0 2",
        "{'train/loss': nan, 'acc': 1.0} None",
        "mlflow train/loss",
        "mlflow acc",
        "log: loss is 'low', which is no number",
        "'float' object cannot be interpreted as an integer",
        "log_to: int has none of add_scalar(), log_metric() and log()",
    ]


# --- the late rank --------------------------------------------------------------------------------
STEPS = """
import os, sys, time
import numpy as np
import ringcomm as rc
rc.init()
late, n_alike = int(sys.argv[1]), 0
for step in range(10**9):
    are_alike = rc.broadcast_object(os.path.exists("alike"))
    n_alike += are_alike
    time.sleep(0.02 + 0.2 * (rc.rank() == late and not are_alike))  # a batch is computed
    for bucket in range(3):
        rc.allreduce(np.ones(10_000, np.float32), name=f"bucket {bucket}")
    if step == 5:
        open(f"{rc.rank()}.here", "w").close()
    if n_alike == 5:
        open(f"{rc.rank()}.alike", "w").close()
    if rc.broadcast_object(os.path.exists("enough")):
        break
"""


@pytest.mark.parametrize("late", at_length([0, 1, 2], [2]))
def test_the_rank_for_which_the_others_wait_is_named_and_no_other(late, tmp_path):
    (tmp_path / "script.py").write_text(STEPS)
    job = start_job(3, tmp_path / "script.py", str(late), cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("*.here"))) == 3, "not all ranks are there")
    name = facts_of(tmp_path)[0]["job"]
    shown = []

    def is_named(right):
        """Look at 3 s. Beside busy processes that late rank may wait, too, for a core."""
        lines = top("--once", "--interval", "3", name).stdout.splitlines()
        named = [line.partition(":")[0] for line in lines if "wait for" in line]
        shown.extend(lines)
        assert named in ([], right), lines
        return named == right

    wait_until(lambda: is_named([f"the others wait for rank {late}"]), lambda: shown)
    (tmp_path / "alike").touch()
    wait_until(lambda: len(list(tmp_path.glob("*.alike"))) == 3, "one is late for ever")
    assert is_named([]), "nobody is late"
    (tmp_path / "enough").touch()
    assert finish_job(job).code == 0


@pytest.mark.parametrize(
    ("waits", "rank"),
    [
        ({}, None),
        ({0: 0.0}, None),
        ({0: 0.0, 1: 0.9, 2: 0.8}, 0),
        ({0: 0.9, 1: 0.85, 2: 0.02}, 2),
        ({0: 0.5, 1: 0.35, 2: 0.4}, None),
        ({0: 0.0, 1: 0.02, 2: 0.9}, None),  # two are late
        ({0: 0.0, 1: 0.2, 2: 0.2}, None),  # a little
        ({0: 1.0, 1: 1.0}, None),
    ],
)
def test_late_rank(waits, rank):
    found = late_rank(waits)
    assert (None if found is None else found.rank) == rank


def test_a_rank_must_be_late_for_three_intervals():
    history = History()
    verdicts = []
    busy_ns = dict.fromkeys(range(3), 0)
    for second, late in enumerate([2, 1, 1, 1, 0, 0, 0]):
        busy_ns = {rank: ns + (rank != late) * 10**9 for rank, ns in busy_ns.items()}
        history.add(second * 10**9, busy_ns)
        history.add(second * 10**9 + 1, {0: 0})  # too soon: not counted
        found = history.late_rank()
        verdicts.append(None if found is None else found.rank)
    assert verdicts == [None, None, None, 1, None, None, 0]


# --- rows ---------------------------------------------------------------------------------------
PAGE = {
    "job": "j", "rank": 3, "size": 4, "host": "h", "pid": 12, "state": 1, "step": 5, "op_state": 0,
    "end_kind": 0, "is_paused": False, "role": "",
    "op_name": "allreduce", "op_start_ns": 0, "n_ended_ops": 0, "ended_nbytes": 0, "busy_ns": 0,
    "heartbeat_ns": 10**9,
}  # fmt: skip


def sample(time_s, *, process=None, ending="", **page):
    facts = PAGE | {"heartbeat_ns": int(time_s * 1e9)} | page
    used = Process(2.0, 3_000_000) if process is None else process
    return RankSample(int(time_s * 1e9), facts, [], [], used or None, ending)


@pytest.mark.parametrize(
    ("changes", "state", "is_bad"),
    [
        ({}, "computes", False),
        ({"op_state": 1}, "waits", False),
        ({"op_state": 1, "is_paused": True}, "paused", False),
        ({"state": 0}, "starting", False),
        ({"state": 2}, "leaving", False),
        ({"state": 3, "process": False}, "left", False),
        ({"process": False}, "dead", True),
        ({"ending": "raised ValueError: boom"}, "raised ValueError: boom", True),
        ({"ending": "stopped", "end_kind": Ending.PEER_FAILED}, "stopped", False),
        ({"heartbeat_ns": 5 * 10**9}, "stopped for 5 s", True),
    ],
)
def test_state_of_a_row(changes, state, is_bad):
    row = row_of(sample(10, **changes), None)
    assert (row.texts[COLUMNS.index("state")], row.is_bad) == (state, is_bad)
    assert len(row.texts) == len(COLUMNS)


def test_a_process_that_has_another_rank_now_says_so_in_a_column_that_others_do_not_need():
    apart = {"rank": 3}, {"rank": 2, "role": "rank 1", "is_paused": True}, {"rank": 1, "process": 0}
    rows = [row_of(sample(10, **each), None) for each in apart]
    shown = [COLUMNS[i] for i in _shown_columns(rows)]
    assert shown[:3] == ["rank", "as rank", "pid"]
    found = [dict(zip(COLUMNS, each.texts, strict=True)) for each in rows]
    assert [(each["rank"], each["as rank"], each["state"]) for each in found] == [
        ("3", "3", "computes"), ("2", "1", "paused"), ("1", "", "dead"),
    ]  # fmt: skip
    alike = [row_of(sample(10, role=role), None) for role in ("", "spare", "server 0", "rank x")]
    assert "as rank" not in [COLUMNS[i] for i in _shown_columns(alike)]
    assert as_json(sample(10, role="spare"))["as_rank"] is None
    assert as_json(sample(10, role="server 0"))["as_rank"] == 3


def test_rates_are_those_between_two_samples():
    before = sample(10, ended_nbytes=1_000_000, busy_ns=10**9, process=Process(2.0, 1))
    now = sample(
        12, ended_nbytes=5_000_000, busy_ns=15 * 10**8, process=Process(3.0, 2_500_000_000)
    )
    texts = dict(zip(COLUMNS, row_of(now, before).texts, strict=True))
    assert (texts["wait"], texts["MB/s"], texts["CPU"]) == ("25%", "2.0", "50%")
    assert texts["memory"] == "2.5 GB"
    pending = sample(12, busy_ns=10**9, op_state=1, op_start_ns=int(11.5e9))
    assert row_of(pending, before).texts[COLUMNS.index("wait")] == "25%"
    assert row_of(pending, None).texts[COLUMNS.index("for")] == "0.5 s"


def test_numbers_that_json_lacks_are_texts():
    now = replace(sample(10), scalars=[("loss", 3, math.nan), ("lr", 3, 0.5), ("x", 3, -math.inf)])
    found = json.loads(json.dumps(as_json(now), allow_nan=False))
    assert found["scalars"] == {"loss": "nan", "lr": 0.5, "x": "-inf"}


def test_long_names_are_shortened():
    row = row_of(sample(10, op_state=1, op_name="x" * 100), None)
    assert row.texts[COLUMNS.index("operation")] == "x" * 37 + "..."


def test_texts_of_a_program_break_no_line_and_give_a_terminal_no_command():
    text = "a\nb\x1b[31m\u009b"
    seen = replace(
        sample(10, op_state=1, op_name=text, ending=f"raised E: {text}"),
        scalars=[(text, 3, 0.5)],
        events=[(10**9, text)],
    )
    shown = [*row_of(seen, None).texts, *latest_events([seen], 5)]
    assert all(each.isprintable() for each in shown), shown
    assert shown[COLUMNS.index("scalars")] == "a b [31m =0.5"
    assert shown[-1].endswith("rank 3: a b [31m ")
    assert as_json(seen)["events"] == [text]


def lines_at_width(width, samples):
    rich_console = pytest.importorskip("rich.console", reason="the core is tested without rich")
    console = rich_console.Console(width=width, file=io.StringIO())
    console.print(_rich(Jobs("none"), samples, {}))
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("roles", [("", "", ""), ("", "", "rank 1")], ids=["first", "moved"])
def test_a_terminal_of_80_columns_has_room_for_each_rank_on_one_line(roles):
    scalars = [("loss", 5, 0.25), ("lr", 5, 0.1), ("accuracy", 5, 0.875)]
    waiting = {"op_state": 1, "op_name": "allreduce_[gradients of bias+1 (optimizer 1)]"}
    samples = [
        replace(
            sample(12, rank=rank, pid=4_194_300 + rank, step=123_456, role=role, **waiting),
            scalars=scalars,
            process=Process(2.0, 123_000_000),
        )
        for rank, role in enumerate(roles)
    ]
    _, heads, *rows = lines_at_width(80, samples)
    if any(roles):
        assert heads.startswith("rank as rank     pid state "), heads
    else:
        assert heads.split() == [each for each in COLUMNS if each not in ("GPU", AS_RANK)], heads
    for rank, row in enumerate(rows):
        begin = rf"{rank}( +\d)? +{4_194_300 + rank} +waits +123456 +"
        start = rf"{begin}allr.* +12\.0 s +.*123 MB +loss="
        assert re.search(start, row), row
    assert len(rows) == 3


def test_a_failure_is_shown_whole_in_80_columns():
    text = " ".join(lines_at_width(80, [sample(10, ending="was killed by SIGKILL", step=17)]))
    assert all(word in text for word in ("was", "killed", "SIGKILL")), text


def test_a_job_on_gpus_has_a_column_for_them():
    _, heads, row = lines_at_width(120, [sample(10, process=Process(2.0, 1, 3_000_000_000))])
    assert ("GPU" in heads, "3.0 GB" in row) == (True, True)


def test_rows_need_neither_rich_nor_mpi():
    names = "[n for n in ('rich', 'mpi4py') if n in sys.modules]"
    code = f"import sys, ringcomm.launch.watch.top; print({names})"
    done = run_command([sys.executable, "-P", "-c", code])
    assert done.stdout == "[]\n", done.stderr


# With the signatures of tensorboardX 2.6 and tensorboard 2.21, which lose what is not flushed.
WRITERS = {
    "tensorboardX": {
        "proto/event_pb2": "from types import SimpleNamespace as Event\n",
        "record_writer": "directory_check = print\n",
        "summary": "def scalar(name, scalar): return name, scalar\n",
        "event_file_writer": """
class EventsWriter:
    def __init__(self, file_prefix, filename_suffix=''): self.prefix, self.queue = file_prefix, []
    def write_event(self, event):
        assert event.wall_time > 0
        self.queue.append((*event.summary, event.step))
    def flush(self):
        for each in self.queue: print(self.prefix, *each, flush=True)
        self.queue.clear()
""",
    },
    "tensorboard": {
        "summary": """
class Writer:
    def __init__(self, output): self.folder, self.queue = output, []
    def add_scalar(self, tag, data, step, *, wall_time=None, description=None):
        self.queue.append((tag, data, step))
    def flush(self):
        for each in self.queue: print(self.folder, *each, flush=True)
        self.queue.clear()
"""
    },
}


@pytest.mark.parametrize("package", at_length(["tensorboardX", "tensorboard", ""], ["tensorboard"]))
def test_rank_0_writes_for_tensorboard_by_the_package_that_is_there(package, tmp_path):
    for name, text in WRITERS.get(package, {}).items():
        module = tmp_path / package / f"{name}.py"
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    job = run_script(
        2,
        "import ringcomm as rc\nrc.init()\nfor step in (3, 4): rc.log(step=step, loss=0.5)\n",
        cwd=tmp_path,
        env={"RINGCOMM_TENSORBOARD": "tb"},
    )
    if package:
        began = "tb\n" if package == "tensorboardX" else ""
        folder = "tb/events" if package == "tensorboardX" else "tb"
        assert job.code == 0
        assert job.output == f"{began}{folder} loss 0.5 3\n{folder} loss 0.5 4\n"
    else:
        assert job.code != 0
        assert "neither tensorboard nor tensorboardX is there: pip install" in job.output
