"""Parameter-server jobs whose ranks are killed; see ci/ps_storms.py."""

from collections import Counter

import pytest
from harness import IS_MPICH, at_length, run_script
from ps_storms import ServerStorm, Storm
from storms import LAUNCHERS

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

# mode, number of workers, who is killed (rank 3 evaluates), launcher
GATE = {
    "one after the other": (
        "sync", 3, ["3@4:evaluating", "1@6:sent", "0@20:stopping"], "continuous",
    )
}  # fmt: skip
EACH = {
    **GATE,
    "sync": ("sync", 3, ["1@6:sent", "3@4:evaluating"], "ulfm"),
    "first_of": ("first_of", 3, ["0@20:stopping"], "continuous"),
    "async": ("async", 3, ["2@5:acked", "3@4:evaluating"], "continuous"),
    "ssp": ("ssp", 3, ["0@8:saving", "1@6:before"], "ulfm"),
    "opening": ("sync", 3, ["0@0:opening"], "ulfm"),
    "snapshot": ("sync", 3, ["1@6:snapshot"], "continuous"),
}


@pytest.mark.parametrize("name", at_length(EACH, GATE))  # a job takes 3 s
def test_the_others_go_on_and_have_what_was_acknowledged(name):
    storm = Storm(*EACH[name])
    outcome = storm.run()
    assert not outcome.problems, (str(storm), outcome.problems, outcome.output)
    for kill in storm.kills:
        rank = int(kill.partition("@")[0])
        role = f"worker {rank}" if rank < storm.n_workers else "evaluator 0"
        assert f", {role}, died" in outcome.output, outcome.output
    assert ("is the chief now" in outcome.output) == any(k[0] == "0" for k in storm.kills)


# mode, number of workers, which servers are killed, launcher
SERVERS_IN_GATE = {"push": ("sync", 2, ["0@30:push-after"], "ulfm")}
SERVERS = {
    **SERVERS_IN_GATE,
    "moving": ("async", 2, ["1@5:moving-after"], "continuous"),
    "saving": ("ssp", 2, ["2@4:saving-soon"], "ulfm"),
    "snapshot": ("first_of", 2, ["0@20:snapshot-before"], "continuous"),
    "recovering": ("sync", 2, ["1@30:push-before", "0@9:recovering-before"], "ulfm"),
}


@pytest.mark.parametrize("name", at_length(SERVERS, SERVERS_IN_GATE))  # a job takes 4 s
def test_all_go_back_to_a_checkpoint_if_servers_are_killed(name):
    storm = ServerStorm(*SERVERS[name])
    outcome = storm.run()
    assert not outcome.problems, (str(storm), outcome.problems, outcome.output)
    assert "all tables are as in the checkpoint of step" in outcome.output, outcome.output


@pytest.mark.at_length  # the other tests show it with fewer ranks
def test_4_servers_and_8_workers_go_on_without_one_of_each():
    """The first worker is the chief; a rank more evaluates."""
    kills = {"kills": ["1@180:push-after"], "worker": "5@2"}
    storm = ServerStorm("sync", 8, launcher="ulfm", n_servers=4, steps=14, **kills)
    outcome = storm.run()
    assert not outcome.problems, (outcome.problems, outcome.output)
    for role in ("worker 5", "server 1"):
        assert f", {role}, died" in outcome.output, outcome.output
    assert "all tables are as in the checkpoint of step" in outcome.output, outcome.output


ONE_VIEW = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.api.init_rank_size import engine

def refused(call):
    try:
        call()
    except rc.ConfigError as error:
        return str(error)
    sys.exit("it was not refused")

@rc.elastic.run
def train(state):
    ps.init(servers=1)

def begin():
    train(rc.elastic.ObjectState())

rc.init()
print("refused:", refused(begin), flush=True)  # on the server, too
ps.init(servers=1)
for call in (begin, lambda: rc.elastic.request_scale(2)):
    print("refused:", refused(call), flush=True)
table, begun = ps.table("t", 4, updater=ps.optim.Add()), engine()
rc.barrier()
if rc.rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
until = time.monotonic() + 30
while not begun.watch.peers.dead:  # pulls drive the loop, which hears of the death
    assert time.monotonic() < until
    table.pull().wait()
for _ in range(3):
    table.push(np.ones(4, np.float32)).wait()
assert table.pull().wait().tolist() == [3] * 4
assert engine() is begun
assert rc.elastic.view().number == 0
print("in the same view", flush=True)
"""


def test_a_job_with_servers_goes_on_in_one_view_and_refuses_what_would_begin_another(tmp_path):
    options = (*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0")
    elastic = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "30"}
    job = run_script(3, ONE_VIEW, cwd=tmp_path, env=elastic, options=options)
    assert job.code == 0, job.output
    assert job.output.count("in the same view") == 1, job.output
    lines = [line for line in job.output.splitlines() if line.startswith("refused:")]
    whose = [" ".join(line.split()[1:3]) for line in lines]
    inside = "ps.init: it"  # does not go with elastic.run
    assert Counter(whose) == {inside: 3, "elastic.run: this": 2, "elastic.request_scale: this": 2}


def test_a_job_with_servers_has_no_spares(tmp_path):
    elastic = {"RINGCOMM_ELASTIC": "1", "RINGCOMM_SPARES": "1"}
    body = "from ringcomm import ps\nps.init(servers=1)"
    job = run_script(2, body, cwd=tmp_path, env=elastic, options=LAUNCHERS["continuous"])
    assert "ConfigError: ps.init: it does not go with RINGCOMM_SPARES=1" in job.output, job.output


COLLECTIVES = """
import os, signal, sys
import numpy as np
import ringcomm as rc
from ringcomm import ps

moment, folder = sys.argv[1:]
ps.init(servers=1)
table = ps.table("t", 4, updater=ps.optim.Add(), mode="sync")
both = rc.Group([0, 2])
values = np.random.default_rng(rc.rank()).integers(-99, 99, 1_000_017).astype(np.float32)
others = sum(np.random.default_rng(r).integers(-99, 99, values.size) for r in (0, 2))
rc.allreduce(values)
step, group, n_failed = 0, None, 0
while not ps.should_stop():
    if rc.rank() == 1 and step == 2:
        if moment == "inside":
            handle = rc.allreduce_async_(values)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        rc.allreduce(values, group=group)
    except rc.PeerFailedError as error:
        assert "no group that it belongs to" in str(error), error
        n_failed += 1
        assert np.array_equal(rc.allreduce(values, group=both), others)
        group = ps.live_workers()
        assert [*group.ranks] == [0, 2]
        assert rc.allgather_object(step, group=group) == [2, 2]
        assert np.array_equal(rc.allreduce(values, group=group), others)
    table.push(np.ones(4, np.float32)).wait()
    step += 1
    ps.complete_step()
    if ps.is_chief() and step == 5:
        ps.save(folder).wait()
        ps.stop()
try:
    rc.barrier()
    sys.exit("a group goes on without one of its ranks")
except rc.PeerFailedError:
    rc.barrier(group=group)
assert n_failed == 1
assert table.pull().wait().tolist() == [step] * 4
print("went on", flush=True)
"""
WHEN_IN_GATE = {"inside": ("inside", "ulfm")}
WHEN = {**WHEN_IN_GATE, "before": ("before", "continuous")}
GOOD = "--runtime-options", "continuous,error-nonzero-status=0"


@pytest.mark.parametrize("when", at_length(WHEN, WHEN_IN_GATE))  # a job takes 3 s
def test_tables_and_new_groups_go_on_after_a_collective_in_which_a_worker_is_killed(when, tmp_path):
    moment, launcher = WHEN[when]
    ulfm = (*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0")
    job = run_script(
        4, COLLECTIVES, moment, tmp_path / "saved", cwd=tmp_path,
        env={"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "30"},
        options=ulfm if launcher == "ulfm" else GOOD,
    )  # fmt: skip
    assert job.code == 0, job.output
    assert job.output.count("went on") == 2, job.output
    assert any((tmp_path / "saved").iterdir())


RAISED = """
import atexit, os, sys, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    atexit.register(time.sleep, 3)  # begins once ringcomm has said that this rank failed
import ringcomm as rc
from ringcomm import ps

ps.init(servers=1)
rc.barrier()
if rc.rank() == 1:
    raise RuntimeError("as a user's program")
try:
    rc.barrier()
    sys.exit("a group goes on without one of its ranks")
except rc.PeerFailedError:
    rc.barrier(group=ps.live_workers())
print("went on", flush=True)
"""


def test_the_others_end_while_the_process_of_a_worker_that_raised_still_ends(tmp_path):
    """It never calls MPI_Finalize, and would be waited for."""
    job = run_script(
        3, RAISED, cwd=tmp_path, env={"RINGCOMM_ELASTIC": "1", "RINGCOMM_TIMEOUT_S": "30"},
        options=(*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0"),
    )  # fmt: skip
    assert job.code == 0, job.output
    assert job.output.count("went on") == 1, job.output
