"""Real jobs in which a worker, and an evaluator, is killed, and a rank that stood by goes on."""

import re

import pytest
from harness import IS_MPICH, run_script
from storms import LAUNCHERS

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

N = 40
# Worker w pushes 3 * (w + 1) in each of N steps: the mean of both is 4.5, of the chief alone 3.
TRAINING = (
    f"N = {N}"
    + """
import os, signal, time
import numpy as np
import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.session import session

P = rc.Params(rate=rc.live(1.0))

@rc.on_checkpoint
def save(step):
    print(f"rank {rank_of_job} saves {step} at rate {P.rate}", flush=True)

def command(text):
    page = session().engine.page
    assert page.take_mailbox(os.getpid())
    page.put_command(text)
    return page

@ps.evaluator(every=1)
def evaluate(step):
    table = open_table()
    values = table.pull().wait()
    assert (values == values[0]).all()
    if rank_of_job == 4 and step >= 3:
        os.kill(os.getpid(), signal.SIGKILL)
    ps.report(step, {"value": values[0]})

def open_table():
    return ps.table("w", 5_000, "float64", updater=ps.optim.Add(), mode="sync",
                    init=np.zeros(5_000), block_nbytes=8_000)

rc.init()
rank_of_job = rc.rank()
ps.init(1, evaluators=1, worker_spares=2)
table, began = open_table(), ps.step_number()
until = time.monotonic() + 60
if began == 0:  # as after hvd.Checkpoint.restore()
    session().engine.control.go_on_from(200)
while ps.step_number() < N:
    step = ps.step_number()
    if rank_of_job == 1 and step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank_of_job == 0 and step == N - 10:  # steps are fast: those who come are waited for
        while len(session().layout.joined) < 2:
            assert time.monotonic() < until
            ps.complete_step(step)
            time.sleep(0.01)  # nobody tells a worker of a newcomer, so it looks again
    if rank_of_job == 0 and step == 3:
        page = command("set rate=0.5")
    if rank_of_job == 0 and step == N - 5:
        assert page.answer.startswith("ok"), page.answer
        page.give_mailbox_back()
        command("checkpoint")
    table.push(np.full(5_000, 3.0 * (ps.rank() + 1))).wait()
    table.pull().wait()
    ps.complete_step()
if ps.is_chief():
    assert [each.rank for each in ps.reports(until=N)][-1] in (2, 3)
print(f"rank {rank_of_job} began at {began}, and has {table.pull().wait()[0]}", flush=True)
"""
)

RUN = {
    "env": {"RINGCOMM_ELASTIC": "1"},
    "options": (*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0"),
}


def test_who_stood_by_trains_and_evaluates_in_the_place_of_those_that_were_killed(tmp_path):
    job = run_script(6, TRAINING, cwd=tmp_path, **RUN)
    assert job.code == 0, job.output
    lines = [line.split() for line in job.output.splitlines() if " began at " in line]
    found = {int(line[-7]): (int(line[-4].strip(",")), float(line[-1])) for line in lines}
    assert found.keys() - {2, 3} == {0}, job.output
    (newcomer,) = found.keys() - {0}
    began, value = found[newcomer]
    assert 5 <= began <= 30, job.output
    assert found[0][1] == value == 4.5 * N - 1.5 * (began - 5), job.output
    saved = dict(re.findall(r"rank (\d) saves (\d+ at rate 0.5)", job.output))
    assert saved.keys() == {"0", str(newcomer)}, job.output
    assert len({*saved.values()}) == 1, job.output
    assert 200 + N - 5 <= int(saved["0"].split()[0]) <= 200 + N, job.output
