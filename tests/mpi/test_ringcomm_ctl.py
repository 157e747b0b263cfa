"""`ringcomm ctl`: all ranks of a live job take a command after the same step."""

import contextlib
import io
import json
import os
import re
import signal
import time

import pytest
from find_ranks_of_a_job import await_steps, ranks_in
from harness import (
    BIN,
    HANG_S,
    IS_MPICH,
    above_mpi,
    finish_job,
    job_environment,
    run_command,
    start_job,
    start_run,
    wait_until,
)

from ringcomm.launch.cli import main
from ringcomm.status.stacks import main_stack, stacks_of, users_frame


def ctl(folder, *words, run=None):
    """Give a command to the job in a folder; return the exit code and what is printed.

    Without the line that names the job, which comes first if the command may be carried out.

    run: the folder of its run, to name it by; None: by its name.
    """
    wait_until(lambda: ranks_in(folder), "there is no job")
    name = next(iter(ranks_in(folder).values())).job
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        # In this process: a start of Python takes 0.2 s.
        code = main(["ctl", str(run or name), *words])
    first, _, rest = said.getvalue().partition("\n")
    is_named = re.fullmatch(
        rf"ringcomm (ctl|stacks): job {name}, .*{re.escape(str(folder))}.*", first
    )
    assert is_named or code == 2, first
    return code, rest if is_named else said.getvalue()


def taken_by(folder):
    """Return the commands that each rank has noted among its events, without its own number."""
    found = []
    for rank, each in sorted(ranks_in(folder).items()):
        texts = [text for _, text in each.events if text.startswith("ctl ")]
        found.append([text.replace(f"timeline.{rank}.json", "timeline") for text in texts])
    return found


def row_of(folder, capsys):
    """Return what `ringcomm runs` says of the run in a folder."""
    capsys.readouterr()
    assert main(["runs", "--runs", str(folder), "--json"]) == 0
    (row,) = [each for each in json.loads(capsys.readouterr().out) if each["name"] == "run"]
    return row


STEPS = """
import os, random, sys, time
import numpy as np
import ringcomm as rc
P = rc.Params(lr=rc.live(0.1), batch=64)
rc.init()
late = random.Random(rc.rank())

@rc.on_checkpoint
def save(step):
    assert step == n  # it was raised before the boundary
    assert rc.allreduce(np.array([step]))[0] == step * rc.size()  # all are here
    print("saved", step, flush=True)

n, seen = 0, []
while not rc.should_stop():
    time.sleep(late.random() * 0.01)
    if n % 3 == 0:
        rc.allreduce(np.ones(1000, np.float32), name="w")
    n += 1
    rc.step()
    if not seen or seen[-1][1] != P.lr:
        seen.append((n, P.lr))
print("end", n, seen, flush=True)
"""


@above_mpi
def test_all_ranks_take_commands_after_the_same_step_and_a_pause_is_no_stall(tmp_path, capsys):
    env = {"RINGCOMM_STALL_WARNING_S": "0.5", "RINGCOMM_TIMEOUT_S": "20"}
    run = start_run(3, STEPS, cwd=tmp_path, env=env)
    await_steps(tmp_path, 3)
    code, said = ctl(tmp_path, "set", "lr=0.5")
    first = re.fullmatch(r"set lr=0\.5: lr is 0\.5 after step (\d+)\n", said)
    assert (code, bool(first)) == (0, True), said
    code, said = ctl(tmp_path, "pause")
    paused = re.fullmatch(r"pause: paused after step (\d+)\n", said)
    assert code == 0
    assert paused, said
    step = paused[1]
    assert ctl(tmp_path, "set", "lr=0.25")[1] == f"set lr=0.25: lr is 0.25 after step {step}\n"
    said = ctl(tmp_path, "checkpoint")[1]
    assert said == f"checkpoint: checkpoint written after step {step}\n"
    wait_until(
        lambda: all(each.page["is_paused"] for each in ranks_in(tmp_path).values()), "not paused"
    )
    busy_s = [each.process.cpu_s for each in ranks_in(tmp_path).values()]
    time.sleep(1.5)  # three times as long as a stall
    found = ranks_in(tmp_path)
    assert {each.page["step"] for each in found.values()} == {int(step)}
    assert max(n.process.cpu_s - s for n, s in zip(found.values(), busy_s, strict=True)) < 0.5
    refused = [["set", "x=3"], ["set", "lr=a"], ["set", "batch=2"], ["pause"], ["timeline", "stop"]]
    assert [ctl(tmp_path, *words)[0] for words in refused] == [1] * len(refused)
    assert ctl(tmp_path, "timeline", "start")[0] == 0
    code, said = ctl(tmp_path, "timeline", "start")  # would begin the files anew
    assert (code, "recorded already, in" in said) == (1, True), said
    code, said = ctl(tmp_path, "frob")
    assert (code, "stacks" in said) == (2, True), said
    shown = run_command(
        [BIN / "ringcomm", "top", "--json", tmp_path / "run"], env=job_environment()
    )
    assert [each["rank"] for each in json.loads(shown.stdout)] == [0, 1, 2]
    assert row_of(tmp_path, capsys)["state"] == "paused"
    by_folder = ctl(tmp_path, "resume", run=tmp_path / "run")
    assert by_folder == (0, f"resume: goes on after step {step}\n")
    wait_until(lambda: row_of(tmp_path, capsys)["state"] == "running", "it is said to be paused")
    traces = [tmp_path / "run" / f"timeline.{rank}.json" for rank in range(3)]
    wait_until(lambda: all("allreduce[w]" in each.read_text() for each in traces), "no timeline")
    code, said = ctl(tmp_path, "timeline", "stop")
    assert code == 0
    last = "ctl " + said.rstrip()
    wait_until(lambda: [each[-1] for each in taken_by(tmp_path)] == [last] * 3, last)
    assert taken_by(tmp_path)[0][:2] == [
        f"ctl set lr=0.5: lr is 0.5 after step {first[1]}",
        f"ctl pause: paused after step {step}",
    ]
    assert taken_by(tmp_path) == [taken_by(tmp_path)[0]] * 3  # each command, after the same step
    code, said = ctl(tmp_path, "scale", "2")
    assert (code, "`ringcomm run --elastic MIN:MAX`" in said) == (1, True), said
    code, said = ctl(tmp_path, "stop")
    assert code == 0
    end = re.fullmatch(r"stop: stops after step (\d+)\n", said)[1]
    output, _ = run.communicate(timeout=HANG_S)
    assert run.returncode == 75, output
    assert "waited" not in output
    logs = [(tmp_path / "run" / f"rank-{rank}.log").read_text() for rank in range(3)]
    seen = f"[(1, 0.1), ({first[1]}, 0.5), ({step}, 0.25)]"
    assert logs == [f"saved {step}\nsaved {end}\nend {end} {seen}\n"] * 3
    row = row_of(tmp_path, capsys)
    assert (row["state"], row["exit_code"], row["ranks"]) == ("stopped", 75, 3)
    assert main(["logs", str(tmp_path / "run"), "--grep", "saved"]) == 0
    found = capsys.readouterr().out.splitlines()
    assert found == [f"[{rank}] saved {n}" for rank in range(3) for n in (step, end)]
    assert main(["stacks", str(tmp_path / "run")]) == 1
    assert "ended at 2" in capsys.readouterr().err


TWO_LINES = """
import torch, ringcomm.torch as hvd
hvd.init()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
for step in range(10**9):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    rate = optimizer.param_groups[0]["lr"]
    optimizer.step()
    if optimizer.param_groups[0]["lr"] != rate:
        print("changed", step + 1, flush=True)
"""
SERVED = (
    TWO_LINES.replace(
        "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
        "optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters(), mode=MODE)",
    )
    .replace(
        "import torch, ringcomm.torch as hvd\nhvd.init()",
        "import random, sys, time, torch, ringcomm.torch.ps as ps\n"
        "MODE = sys.argv[1]\nps.init(servers=1)\nlate = random.Random(ps.rank() if 0 else None)",
    )
    .replace("    optimizer.step()", "    time.sleep(late.random() * 0.02)\n    optimizer.step()")
)


@pytest.mark.at_length  # 3 jobs of 3 ranks, for what the steps above show
@pytest.mark.parametrize("mode", ["", "sync", "async"])
def test_a_job_of_two_lines_takes_commands(mode, tmp_path):
    (tmp_path / "train.py").write_text(SERVED if mode else TWO_LINES)
    job = start_job(3, tmp_path / "train.py", *[mode] * bool(mode), cwd=tmp_path)
    workers = range(1, 3) if mode else range(3)
    wait_until(
        lambda: (
            sum(each.page["takes_commands"] for each in ranks_in(tmp_path).values()) == len(workers)
        ),
        "no steps",
    )
    code, said = ctl(tmp_path, "set", "lr=0.05")
    assert code == 0, said
    step = re.search(r"after step (\d+)", said)[1]
    assert ctl(tmp_path, "pause")[0] == 0
    time.sleep(0.5)  # steps would be made meanwhile
    assert ctl(tmp_path, "resume")[0] == 0
    assert ctl(tmp_path, "stop")[0] == 0
    done = finish_job(job)
    assert done.code == 75, done
    assert done.output.count(f"changed {step}\n") == len(workers), (said, done.output)
    assert done.output.count("changed") == len(workers)


DIES = """
import os, signal
from ringcomm.engine.api.init_rank_size import engine
if rc.rank() == 0:
    watch, told = engine().watch, []
    tell = watch.tell
    def tell_and_die(dest, kind, text="", **fields):
        tell(dest, kind, text, **fields)
        told.append((kind.name, fields.get("round")))
        if sys.argv[1] == "after the first" and told[-1] == ("CONTROL", 2):
            time.sleep(0.5)  # rank 1 has the command by then, and acts on it
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[1] == "before" and told[-1] == ("CONTROL", 0):
            os.kill(os.getpid(), signal.SIGKILL)
    watch.tell = tell_and_die
"""


@pytest.mark.at_length  # jobs of 4 ranks, for one moment each
@pytest.mark.parametrize("when", ["before", "after the first"])
def test_a_rank_that_dies_between_ends_the_job_at_once(when, tmp_path):
    (tmp_path / "train.py").write_text(STEPS.replace("late =", f"{DIES}\nlate ="))
    job = start_job(4, tmp_path / "train.py", when, cwd=tmp_path)
    await_steps(tmp_path, 4)
    code, said = ctl(tmp_path, "pause")
    assert (code, "ended before it answered" in said) == (1, True), said
    done = finish_job(job)
    assert done.code != 0
    assert done.seconds < 60
    assert "rank 0" in done.output


ELASTIC = (
    STEPS.replace("late =", f"{DIES}\nlate =")
    .replace(
        "n, seen = 0, []\n",
        "state = rc.elastic.ArrayState(step=0, x=np.zeros(3))\n"
        "@rc.elastic.run\ndef train(state):\n",
    )
    .partition("def train(state):\n")[0]
    + """def train(state):
    while not (rc.size() < 4 and os.path.exists("enough")):
        time.sleep(0.01)  # a step takes so long
        state.x += rc.allreduce(np.ones(3))
        state.step += 1
        state.commit()
        if rc.rank():
            time.sleep(0.8)  # rank 0 comes first, and so all can take the command after this step
        rc.step()
        if rc.size() < 4:
            print("lr", P.lr, flush=True)
            open(f"{rc.rank()}.here", "w").close()
        if rc.broadcast_object(os.path.exists("enough")):
            return
train(state)
"""
)


@pytest.mark.at_length  # jobs of 4 ranks, for one moment each
@pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")
@pytest.mark.parametrize("when", ["before", "after the first"])
def test_of_an_elastic_job_all_or_none_have_taken_the_command(when, tmp_path):
    (tmp_path / "train.py").write_text(ELASTIC)
    job = start_job(
        4, tmp_path / "train.py", when, cwd=tmp_path,
        options=["--with-ft", "ulfm"], env={"RINGCOMM_ELASTIC": "1"},
    )  # fmt: skip
    await_steps(tmp_path, 4)
    assert ctl(tmp_path, "set", "lr=0.5")[0] == 1
    wait_until(lambda: len(list(tmp_path.glob("*.here"))) == 3, "it does not go on")
    (tmp_path / "enough").touch()
    output = finish_job(job).output
    rates = set(re.findall(r"lr ([\d.]+)", output))
    assert rates == ({"0.1"} if when == "before" else {"0.5"}), output


SCALED = """
import os, time
import numpy as np
import ringcomm as rc
rc.init()

@rc.elastic.run
def train(state):
    while rc.size() == 3 or state.step < 5:
        time.sleep(0.01)  # a step takes so long
        state.x += rc.allreduce(np.ones(1))
        state.step += 1
        state.commit()
        rc.step()
    print("ends with", rc.size(), flush=True)

train(rc.elastic.ArrayState(step=0, x=np.zeros(1)))
"""


@pytest.mark.skipif(IS_MPICH, reason="MPICH has no elastic jobs")
def test_scale_lets_an_elastic_job_go_on_with_fewer_ranks(tmp_path):
    (tmp_path / "train.py").write_text(SCALED)
    job = start_job(
        3, tmp_path / "train.py", cwd=tmp_path,
        options=["--with-ft", "ulfm"], env={"RINGCOMM_ELASTIC": "1"},
    )  # fmt: skip
    await_steps(tmp_path, 3)
    code, said = ctl(tmp_path, "scale", "9")
    assert (code, "9" in said) == (1, True), said
    code, said = ctl(tmp_path, "scale", "2")
    assert (code, said.startswith("scale 2: 2 ranks are asked for after step ")) == (0, True), said
    done = finish_job(job)
    assert (done.code, done.output.count("ends with 2\n")) == (0, 2), done.output


@pytest.mark.at_length  # any wait ends so, which tests/fault shows
def test_a_death_during_a_pause_ends_the_job(tmp_path):
    (tmp_path / "train.py").write_text(STEPS)
    job = start_job(3, tmp_path / "train.py", cwd=tmp_path)
    await_steps(tmp_path, 3)
    assert ctl(tmp_path, "pause")[0] == 0
    os.kill(ranks_in(tmp_path)[2].page["pid"], signal.SIGKILL)
    done = finish_job(job)
    assert (done.code != 0, done.seconds < 60) == (True, True)
    assert "rank 2" in done.output


HANGS = """
import ctypes, os
import ringcomm as rc
rc.init()
rc.barrier()
open(f"{rc.rank()}.here", "w").close()
def wait_in_c():
    end, _ = os.pipe()
    ctypes.PyDLL(None).read(end, ctypes.create_string_buffer(1), 1)  # holds Python's lock
if rc.rank() == 1:
    wait_in_c()
rc.barrier()
"""


@above_mpi
def test_stacks_are_printed_though_a_rank_hangs_in_c_and_holds_python_s_lock(tmp_path):
    (tmp_path / "train.py").write_text(HANGS)
    job = start_job(2, tmp_path / "train.py", cwd=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("*.here"))) == 2, "not all ranks are there")
    code, said = ctl(tmp_path, "stacks")
    assert code == 0
    assert re.search(r"rank 1 \(pid \d+\):\n(.*\n)*.*train\.py\", line 9 in wait_in_c", said), said
    page = ranks_in(tmp_path)[0].page
    frame = users_frame(main_stack(stacks_of(page), page["main_thread"]))
    assert frame is not None
    assert (frame.file, frame.line) == (str(tmp_path / "train.py"), "12")
    code, said = ctl(tmp_path, "pause")
    assert (code, "has not come to a step boundary" in said) == (1, True)
    os.kill(ranks_in(tmp_path)[1].page["pid"], signal.SIGKILL)
    assert finish_job(job).code != 0


STALLS = """
import time
import ringcomm as rc
rc.init()
def collate():  # takes longer than a stall
    time.sleep(2.5)
if rc.rank() == 1:
    collate()
rc.barrier()
"""


@above_mpi
def test_a_stall_warning_has_the_line_at_which_the_missing_rank_is(tmp_path):
    (tmp_path / "train.py").write_text(STALLS)
    warned = {"RINGCOMM_STALL_WARNING_S": "0.3"}
    done = finish_job(start_job(2, tmp_path / "train.py", cwd=tmp_path, env=warned))
    where = f"rank 1 is in no operation, at {tmp_path}/train.py:6 in collate"
    assert (done.code, where in done.output) == (0, True), done.output
