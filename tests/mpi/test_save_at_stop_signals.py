"""SIGTERM or SIGUSR1 to any rank: all ranks save a checkpoint after the same step, and exit 75."""

import os
import signal

import pytest
from find_ranks_of_a_job import await_caught, await_steps, ranks_in
from harness import (
    IS_MPICH,
    above_mpi,
    at_length,
    finish_job,
    start_job,
    start_run,
)

RING = """
import sys
import numpy as np
import ringcomm as rc
rc.init()
step = 0
@rc.on_checkpoint
def save(step):
    assert rc.allreduce(np.array([step]))[0] == step * rc.size()  # all are here
    print("saved", step, flush=True)
while not ("asks" in sys.argv and rc.should_stop()):
    rc.allreduce(np.ones(1000, np.float32), name="w")
    step += 1
    rc.step()
print("ends by itself after", step, flush=True)
sys.exit(75)
"""


def send(folder, number, ranks):
    found = ranks_in(folder)
    for rank in ranks:
        os.kill(found[rank].page["pid"], number)


@pytest.mark.parametrize(
    ("number", "ranks", "words"),
    at_length(
        [
            (signal.SIGTERM, [1], []),
            (signal.SIGUSR1, [0, 1, 2], []),
            (signal.SIGTERM, [0, 1, 2], ["asks"]),
        ],
        [(signal.SIGTERM, [1], [])],  # a job takes 2 s
    ),
)
def test_whichever_rank_gets_a_signal_all_save_after_one_step_and_exit_75(
    number, ranks, words, tmp_path
):
    (tmp_path / "train.py").write_text(RING)
    job = start_job(3, tmp_path / "train.py", *words, cwd=tmp_path)
    await_caught(tmp_path, 3)
    await_steps(tmp_path, 3)  # MPICH catches SIGUSR1 itself, from the start
    send(tmp_path, number, ranks)
    done = finish_job(job)
    saved = [line for line in done.output.splitlines() if line.startswith("saved ")]
    assert (done.code, len(saved), len(set(saved))) == (75, 3, 1), done.output
    assert done.output.count(f"{number.name}: the job saves") in range(1, len(ranks) + 1)
    assert "died" not in done.output
    by_itself = f"ends by itself after {saved[0].split()[1]}\n"
    assert done.output.count(by_itself) == 3 * bool(words), done.output


@above_mpi
def test_ringcomm_run_passes_sigusr1_on_and_ends_with_75(tmp_path):
    job = start_run(2, RING, cwd=tmp_path)
    await_caught(tmp_path, 2)
    job.send_signal(signal.SIGUSR1)
    done = finish_job(job)
    assert (done.code, done.output.count("] saved ")) == (75, 2), done.output
    assert "stopped in order by a signal" in done.output


# Without its child no rank completes a step. It is no daemon: the rank's exit waits for its end.
CHILD = """
import multiprocessing
def answer(there):
    while True:
        there.send(there.recv())
here, there = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=answer, args=(there,)).start()
there.close()
while True:
    here.send(step)
    assert here.recv() == step
"""
WITH_CHILD = RING.replace('while not ("asks" in sys.argv and rc.should_stop()):\n', CHILD)


@pytest.mark.skipif(IS_MPICH, reason="its mpirun passes no signal to process groups")
def test_children_hold_the_signal_until_all_have_saved_and_end_with_their_rank(tmp_path):
    (tmp_path / "train.py").write_text(WITH_CHILD)
    job = start_job(2, tmp_path / "train.py", cwd=tmp_path)
    await_caught(tmp_path, 2)
    job.send_signal(signal.SIGUSR1)  # mpirun passes it to the process groups of the ranks
    done = finish_job(job)
    assert (done.code, done.output.count("saved ")) == (75, 2), done.output
    assert "EOFError" not in done.output


NOTHING_TO_SAVE = """
import numpy as np
import ringcomm as rc
rc.init()
while True:
    rc.allreduce(np.ones(10, np.float32))
    rc.step()
"""


@pytest.mark.at_length  # the default of the kernel
def test_a_job_that_cannot_save_is_ended_by_the_signal(tmp_path):
    (tmp_path / "train.py").write_text(NOTHING_TO_SAVE)
    job = start_job(2, tmp_path / "train.py", cwd=tmp_path)
    await_steps(tmp_path, 2)
    send(tmp_path, signal.SIGTERM, [1])
    done = finish_job(job)
    assert done.code not in (0, 75)
    assert "rank 1" in done.output


SERVED = """
import sys
import numpy as np
import ringcomm as rc
from ringcomm import ps
@ps.evaluator(every=10)
def evaluate(step):
    pass
ps.init(1, evaluators=int(sys.argv[2]), recover="saves")
w = ps.table("w", 500, "float64", updater=ps.optim.Add(), mode=sys.argv[1], block_nbytes=800)
found = ps.restore("saves") if ps.is_chief() else None
found = rc.broadcast_object(found)
first = 0 if found is None else found["step"]
values = w.pull().wait()
per_step = 1 if sys.argv[1] == "sync" else ps.size()
assert (values == first * per_step).all(), (first, values)
print("begins after", first, flush=True)
ps.complete_step(first)
rc.barrier()
if found is not None:
    sys.exit(0)
while True:
    w.push(np.ones(500))  # is under way when the signal comes
    if sys.argv[1] == "sync":
        w.pull().wait()
    ps.complete_step()
"""


@pytest.mark.skipif(IS_MPICH, reason="MPICH catches SIGUSR1, so await_caught() learns nothing")
@pytest.mark.parametrize(
    ("mode", "n_evaluators"), at_length([("sync", 1), ("async", 0)], [("async", 0)])
)  # two jobs of 3 s
def test_with_servers_the_chief_saves_all_pushes_and_the_next_job_goes_on(
    mode, n_evaluators, tmp_path
):
    (tmp_path / "train.py").write_text(SERVED)
    size, words = 3 + n_evaluators, (tmp_path / "train.py", mode, str(n_evaluators))
    job = start_job(size, *words, cwd=tmp_path)
    await_caught(tmp_path, size)
    send(tmp_path, signal.SIGTERM, [size - 1])  # a server
    done = finish_job(job)
    assert done.code == 75, done.output
    assert done.output.count("SIGTERM: the job saves") == 1
    assert "died" not in done.output, done.output
    again = finish_job(start_job(size, *words, cwd=tmp_path))
    assert again.code == 0, again.output
    first = {line for line in again.output.splitlines() if line.startswith("begins after ")}
    assert len(first) == 1
    assert first != {"begins after 0"}
