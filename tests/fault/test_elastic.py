"""Elastic jobs: ranks die, fail, leave or come late, and the others go on with exact results."""

import random
import re
from pathlib import Path

import pytest
from harness import BIN, IS_MPICH, at_length, job_environment, run_command, run_job, run_script
from storms import CELLS, LAUNCHERS, random_storm, reaches, storm_of

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

ELASTIC = {"RINGCOMM_ELASTIC": "1"}

PRELUDE = """
import os, signal, sys, time
import numpy as np
import ringcomm as rc
rc.init()
me = rc.rank()
state = rc.elastic.ArrayState(step=0, x=np.zeros(1000))

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def step(state):
    state.x += rc.allreduce(np.full(1000, me + 1.0))
    state.step += 1
    state.commit()
"""


def run_elastic(n, body, *, options=LAUNCHERS["ulfm"], cwd, launcher_may_hang=False, **environment):
    return run_script(
        n, PRELUDE + body, cwd=cwd, options=options, env=ELASTIC | environment,
        launcher_may_hang=launcher_may_hang,
    )  # fmt: skip


STORMS = [(seed, launcher) for seed in range(20) for launcher in LAUNCHERS]


@pytest.mark.parametrize(("seed", "launcher"), at_length(STORMS, [STORMS[3]]))
def test_after_a_storm_all_that_live_have_the_same_exact_state(launcher, seed):
    storm = random_storm(random.Random(seed), launcher)
    outcome = storm.run()
    assert outcome.verdict == "right", (str(storm), outcome.output, outcome.results)


# Cells that other tests reach less well.
IN_THE_GATE = ["sent/leader", "receiving/newcomer"]


@pytest.mark.parametrize("cell", at_length(CELLS, IN_THE_GATE))
def test_a_fault_of_any_kind_in_any_role_leaves_the_others_with_an_exact_state(cell):
    storm = storm_of(cell, "ulfm", random.Random(cell))
    outcome = storm.run()
    assert outcome.verdict == "right", (str(storm), outcome.output, outcome.results)
    assert reaches(cell, outcome), (str(storm), outcome)


MANY_WAYS = """
handles = []

@rc.elastic.run
def train(state):
    while state.step < 30:
        if me == 3 and state.step == 5:
            raise ValueError("boom")
        if me == 2 and state.step == 10:
            os._exit(4)
        if not handles and me == 0:
            handles.append(rc.allreduce_async(np.ones(3), name="never"))
        step(state)
        time.sleep(0.002)  # so that deaths fall into steps, too
    return "done"

assert train(state) == "done"
time.sleep(0.5)  # longer than RINGCOMM_GRACE_S, after which a guardian ends what is left of a job
assert rc.elastic.view() == rc.elastic.View(2, (0, 1))
assert (rc.rank(), rc.size(), rc.local_size()) == (me, 2, 2)
assert state.step == 30
assert state.x[0] in {a * 10 + b * 6 + (30 - a - b) * 3 for a in (5, 6) for b in range(3, 6)}
if me == 0:
    try:
        handles[0].wait()
    except rc.PeerFailedError as error:
        assert error.view == 0, error.view
        assert rc.elastic.view().number == 2
from ringcomm import ps
try:
    ps.init()
except rc.ConfigError as error:
    assert "works in view 0 of a job, and this is view 2" in str(error)
    print("refused", flush=True)
rc.allreduce(np.ones(3))
rc.shutdown()
print("left in order", flush=True)
"""


# Without error-nonzero-status=0 mpirun ends the others when half of all processes have ended with a
# code that is not 0, or, without ULFM, 0.1 s after the first (measured). Its own exit code says
# nothing: the job goes on, and may end well.
ANY_EXIT = [
    (*LAUNCHERS["ulfm"], "--runtime-options", "error-nonzero-status=0"),
    ("--runtime-options", "continuous,error-nonzero-status=0"),
]


# What ranks do is the same under each; see the refusal below, of "continuous".
@pytest.mark.parametrize("options", at_length(ANY_EXIT, ANY_EXIT[:1]))
def test_ranks_that_fail_in_any_way_are_named_and_the_others_go_on(options, tmp_path):
    environment = {"RINGCOMM_TIMELINE": str(tmp_path / "trace"), "RINGCOMM_GRACE_S": "0.2"}
    job = run_elastic(4, MANY_WAYS, options=options, cwd=tmp_path, **environment)
    assert job.output.count("left in order") == 2, job.output
    assert job.output.count("refused") == 2
    assert "x rank 3 " in job.output
    assert "x rank 2 " in job.output
    assert "called os._exit(4)" in job.output
    names = {path.name for path in tmp_path.glob("trace.*")}
    assert {"trace.0.json", "trace.1.view1.json", "trace.0.view2.json"} <= names


SAMPLES = """
import gc
gc.disable()  # what of an old view is dropped late is not mapped twice

def windows():
    return sum("ringcomm-board" in line for line in open("/proc/self/maps"))

mapped = []
N, kill_at = 203, {(2, 3), (0, 9), (1, 12)}
loader = rc.data.Loader(np.arange(N), 4, sampler=rc.data.ShardedSampler(N, remainder="uneven"))
state = rc.elastic.ArrayState(step=0, seen=np.zeros((2, N)), loader=loader)

@rc.elastic.run
def train(state):
    for epoch in range(loader.sampler.epoch, 2):
        for batch in loader:
            mine = np.zeros(N)
            mine[batch] = 1
            both = rc.allreduce(mine)
            if (me, state.step) in kill_at:
                die()
            state.seen[epoch] += both
            state.step += 1
            state.commit()
            mapped.append(windows())

train(state)
assert rc.elastic.view() == rc.elastic.View(3, (3, 4)), rc.elastic.view()
print("each sample once:", (state.seen == 1).all(), flush=True)
print("mapped once:", max(mapped) <= mapped[0], mapped[0], mapped[-1], flush=True)
state = rc.elastic.ArrayState(step=0, x=np.zeros(1000))

@rc.elastic.run
def lose_one_more(state):
    while state.step < 20:
        if (me, state.step) == (4, 5):
            die()
        step(state)

lose_one_more(state)
"""


@pytest.fixture(scope="module")
def of_samples(tmp_path_factory):
    """A job of 5 ranks of which 3 die, in the midst of epochs, and after these one more."""
    folder = tmp_path_factory.mktemp("samples")
    return run_elastic(5, SAMPLES, cwd=folder, RINGCOMM_ELASTIC_LOSSES="3")


def test_each_sample_is_in_one_committed_step_whoever_dies(of_samples):
    assert of_samples.output.count("each sample once: True") == 2, of_samples.output


def test_views_that_are_over_map_no_memory_of_their_own(of_samples):
    assert of_samples.output.count("mapped once: True") == 2, of_samples.output


def test_more_losses_than_were_prepared_for_are_an_error_that_says_so(of_samples):
    text = "the job has lost 4 ranks, and init() was prepared for 3: set RINGCOMM_ELASTIC_LOSSES"
    assert text in of_samples.output, of_samples.output


IN_TURN = """
@rc.elastic.run
def in_groups(state):
    mine = rc.Group([r for r in range(rc.size()) if r % 2 == rc.rank() % 2])
    while state.step < 10:
        if (state.step, rc.size()) == (5, 6):
            if me == 1:
                die()
            while me > 1:  # they hear of it outside of an operation, and stop
                state.check_host_updates()
                time.sleep(1e-3)  # so that the others have the core
        rc.allreduce(np.ones(3), group=mine)  # rank 0 waits for rank 2, not for the dead one
        step(state)

in_groups(state)
print(f"rank {me} is done: {rc.size()} ranks, {state.x[0]:g}", flush=True)
state = rc.elastic.ArrayState(step=0, x=np.zeros(1000))

@rc.elastic.run
def leaving(state):
    while state.step < 20:
        if me == 0 and state.step == 5:
            rc.shutdown()  # in the midst of the run
            print("rank 0 has left", flush=True)
            sys.exit(0)
        if me == 2 and state.step == 5:
            time.sleep(0.5)  # the others wait for it, and rank 0 for them all
            die()
        step(state)

leaving(state)
assert rc.elastic.view().members == (3, 4, 5)
print(f"rank {me} is done without it", flush=True)
state = rc.elastic.ArrayState(step=0, x=np.zeros(1000))

@rc.on_checkpoint
def save(n):
    print(f"rank {me} saves number {n} after step {state.step}", flush=True)

@rc.elastic.run
def saving(state):
    while state.step < 1000:
        if (me, state.step) == (4, 20):
            die()
        if (me, state.step) == (3, 25):
            os.kill(os.getpid(), signal.SIGUSR1)
        step(state)
        rc.step()

saving(state)
"""


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory):
    """A job of 6 ranks with three runs, one after the other, in each of which ranks are lost."""
    folder = tmp_path_factory.mktemp("in_turn")
    return run_elastic(6, IN_TURN, cwd=folder, RINGCOMM_TIMEOUT_S="30")


def test_a_rank_in_a_group_without_the_dead_one_follows_the_members_that_have_stopped(in_turn):
    for rank in (0, 2, 3, 4, 5):
        assert f"rank {rank} is done: 5 ranks, {5 * 21 + 5 * 19}" in in_turn.output, in_turn.output


def test_a_rank_that_leaves_early_keeps_nobody_waiting(in_turn):
    assert "rank 0 has left" in in_turn.output, in_turn.output
    assert in_turn.output.count("is done without it") == 3, in_turn.output
    assert in_turn.seconds < 60


def test_a_later_checkpoint_has_a_larger_number_also_after_a_loss(in_turn):
    saved = re.findall(r"rank (\d) saves number (\d+) after step (\d+)", in_turn.output)
    assert sorted(rank for rank, _, _ in saved) == ["3", "5"], in_turn.output
    assert all(number == step for _, number, step in saved), in_turn.output


SPARES = """
if me == 5:
    time.sleep(1)  # it has not arrived when the first ranks die

@rc.elastic.run
def train(state):
    while state.step < 150:
        if (me, state.step) in ((1, 5), (2, 10)):
            die()
        if (me, state.step) == (3, 120):
            rc.elastic.leave()
        state.step += 1
        sizes.append(rc.size())
        state.x += rc.allreduce(np.ones(1000))
        time.sleep(0.02)  # so that those who are asked for come within these steps
        state.commit()

sizes = []
try:
    rc.allreduce(np.ones(3))
except rc.RingcommError as error:
    assert "has no place in the job, because it is a spare" in str(error)
    assert (me, rc.size()) in ((4, 6), (5, 6)), "a spare has the numbers of all processes"
train(state)
print(f"rank {me} is done: {rc.rank()} of {rc.size()}, {sorted(set(sizes))}", flush=True)
print("state", state.x[0], flush=True)
"""


@pytest.mark.parametrize("launcher", at_length(list(LAUNCHERS), ["ulfm"]))
def test_spares_take_the_places_of_lost_ranks_and_late_ones_join_at_a_commit(launcher, tmp_path):
    options = LAUNCHERS[launcher]
    job = run_elastic(6, SPARES, cwd=tmp_path, options=options, RINGCOMM_SPARES="2")
    assert "rank 4 is done: 1 of 3, [3, 4]" in job.output, job.output
    assert "rank 5 is done: 2 of 3, [3, 4]" in job.output
    assert "rank 0 is done: 0 of 3, [3, 4]" in job.output
    assert len(set(re.findall(r"state .*", job.output))) == 1
    assert "x rank 3 " not in job.output, "who leaves in order is no failure"


HANGS = """
@rc.elastic.run
def train(state):
    while state.step < 20:
        if (me, state.step) == (0, 5):
            os.kill(os.getpid(), signal.SIGSTOP)
        if (me, state.step) == (2, 10) and len(sys.argv) > 1:
            time.sleep(600)  # it hangs until it is killed
        step(state)

train(state)
print(f"rank {me} is done: {rc.rank()} of {rc.size()}", flush=True)
state = rc.elastic.ArrayState(step=0, x=np.zeros(1000))

@rc.elastic.run
def of_two(state):
    while state.step < 10:
        if (me, state.step) == (2, 3):
            rc.elastic.leave()
        step(state)
    if me == 1:
        time.sleep(600)  # after its last operation, until it is killed

of_two(state)
print(f"rank {me} is left: {rc.rank()} of {rc.size()}", flush=True)
"""


@pytest.fixture(scope="module", params=at_length([2, 3], [3]))
def hung(request, tmp_path_factory):
    """A job of 3 ranks and a spare: how many come to the end of the first run, and its output."""
    body = HANGS.replace("len(sys.argv) > 1", str(request.param == 2))
    limits = {"RINGCOMM_ELASTIC_HANG_S": "6", "RINGCOMM_GRACE_S": "0.5"}
    folder, spares = tmp_path_factory.mktemp("hung"), {"RINGCOMM_SPARES": "1"}
    job = run_elastic(4, body, cwd=folder, launcher_may_hang=True, **spares, **limits)
    return request.param, job.output


def test_ranks_that_hang_are_killed_if_the_user_wants_it_and_the_others_go_on(hung):
    n, output = hung
    for rank in [0, 2] if n == 2 else [0]:
        assert f"rank {rank} at first (host" in output, output
    assert f"rank 1 is done: 0 of {n}" in output
    assert f"rank 3 is done: 1 of {n}" in output


def test_half_of_the_ranks_go_on_if_the_first_hangs_even_at_the_end(hung):
    _, output = hung
    assert "rank 1 at first (host" in output, output
    assert "rank 3 is left: 0 of 1" in output, output


WAITS_FOR_ONE_THAT_HANGS = """
@rc.elastic.run
def train(state):
    pair = rc.Group([0, 2]) if rc.size() == 4 else None
    while state.step < 20:
        if (me, state.step) == (0, 5):
            os.kill(os.getpid(), signal.SIGSTOP)
        if pair is not None and me in (0, 2):
            rc.allreduce(np.ones(3), group=pair)
        step(state)

train(state)
print(f"rank {me} is done: {rc.rank()} of {rc.size()}", flush=True)
"""


@pytest.mark.at_length  # it takes some seconds more than the limit
def test_a_rank_that_only_waits_for_one_that_hangs_is_not_taken_for_another(tmp_path):
    job = run_elastic(
        4, WAITS_FOR_ONE_THAT_HANGS, cwd=tmp_path, launcher_may_hang=True,
        RINGCOMM_ELASTIC_HANG_S="6",
    )  # fmt: skip
    assert "rank 2 is done: 1 of 3" in job.output, job.output


MOST_HANG = """
@rc.elastic.run
def train(state):
    while state.step < 20:
        if me == 0 and state.step == 2:
            rc.elastic.request_scale(3)  # so rank 3 is a process without a place, as rank 4 is
        if me in (0, 2) and state.step == 5:
            os.kill(os.getpid(), signal.SIGSTOP)
        step(state)

rc.on_checkpoint(lambda n: print("saved", n, flush=True))
try:
    train(state)
except SystemExit as end:
    print(f"rank {me} ends with {end.code}", flush=True)
    raise
"""


def test_a_rank_that_is_alone_with_those_that_hang_ends_the_job_and_so_do_all_others(tmp_path):
    limits = {"RINGCOMM_ELASTIC_HANG_S": "3", "RINGCOMM_GRACE_S": "0.5"}
    more = {"RINGCOMM_SPARES": "1", "RINGCOMM_RESERVES": "1"}
    job = run_elastic(6, MOST_HANG, cwd=tmp_path, launcher_may_hang=True, **more, **limits)
    assert "half of its ranks or more do not come" in job.output, job.output
    assert job.output.count("saved 5") == 1, job.output
    for rank in (1, 3, 4):
        assert f"rank {rank} ends with 75" in job.output, job.output
    assert job.output.count("This process, without a place, ends, too") == 3, "5 slept in init()"
    for rank in (0, 2):
        assert f"rank {rank} at first (host" in job.output, "they are killed, so the job ends"


RESIZED = """
@rc.elastic.run
def train(state):
    try:
        while state.step < 80:
            if rc.rank() == 0 and state.step % 10 == 5:
                rc.elastic.request_scale(5 - rc.size())
            step(state)
            sizes.append(rc.size())
    except rc.RingcommError:
        if me == 2:  # as if it alone had made steps, which the others make again without it
            state.x[:] = -1
            for _ in range(20):  # more than they make before it comes back
                state.commit()
        raise

sizes = []
train(state)
print(f"rank {me} is done, {sizes[-1]}, view {rc.elastic.view().number}", flush=True)
print(f"{state.x[0]:g} at the end", flush=True)

from ringcomm.engine.api.one_error_for_all import gather_or_raise

@rc.elastic.run
def refuse(state):
    print(f"rank {me} goes on in view {rc.elastic.view().number}", flush=True)
    error = rc.RingcommError("/data/x is damaged: copy it again") if me == 1 else None
    gather_or_raise("data", None, error)
    print("not reached", flush=True)

refuse(state)
"""


@pytest.fixture(scope="module", params=at_length(ANY_EXIT, ANY_EXIT[1:]))
def resized(request, tmp_path_factory):
    """A job of 3 ranks, whose last one leaves and comes back 4 times; then one refuses its data."""
    return run_elastic(3, RESIZED, options=request.param, cwd=tmp_path_factory.mktemp("resized"))


def test_a_small_job_can_change_as_often_as_is_said_by_default(resized):
    assert "rank 0 is done, 3, view 8" in resized.output, resized.output


def test_who_leaves_the_view_and_comes_back_has_the_state_of_the_others(resized):
    ends = re.findall(r"^(\d+) at the end$", resized.output, re.MULTILINE)
    assert len(ends) == 3, resized.output
    assert len(set(ends)) == 1


def test_what_one_rank_refuses_is_no_loss_all_end_with_it_and_one_prints_it(resized):
    assert sorted(re.findall(r"rank \d goes on in view \d", resized.output)) == [
        f"rank {rank} goes on in view 8" for rank in range(3)
    ], resized.output
    assert "not reached" not in resized.output
    assert resized.output.count("Traceback") == 1
    assert "RingcommError: data: rank 1: /data/x is damaged: copy it again" in resized.output
    assert "died" not in resized.output


GROWS = """
@rc.elastic.run
def train(state):
    while state.step < 400:
        if (me, state.step) == (1, 5):
            die()
        if state.step == 50 and rc.rank() == 1:
            rc.elastic.request_scale(4)
        if state.step == 150:
            rc.elastic.request_scale(2)
        if state.step == 250:
            rc.elastic.request_scale(3)
        state.step += 1
        sizes.append(rc.size())
        state.x += rc.allreduce(np.ones(1000))
        time.sleep(0.01)  # so that those who are asked for come within these steps
        state.commit()

sizes = []
if me == 0:
    try:
        rc.elastic.request_scale(7)
    except ValueError as error:
        assert "it must be 1 (RINGCOMM_ELASTIC_MIN) to 5" in str(error), error
train(state)
print(f"rank {me} of {rc.size()} is done, {sorted(set(sizes))}, {state.x[0]:g}", flush=True)
"""


@pytest.mark.parametrize("launcher", at_length(list(LAUNCHERS), ["continuous"]))
def test_reserves_replace_lost_ranks_and_the_job_grows_and_shrinks(launcher, tmp_path):
    options = LAUNCHERS[launcher]
    job = run_elastic(5, GROWS, cwd=tmp_path, options=options, RINGCOMM_RESERVES="2")
    assert job.output.count("of 3 is done") == 3, job.output
    assert len(set(re.findall(r", (\d+)$", job.output, re.MULTILINE))) == 1, job.output
    assert "rank 0 of 3 is done, [2, 3, 4]" in job.output


def test_a_job_of_spares_alone_is_refused(tmp_path):
    done = run_command(
        [BIN / "python", "-P", "-c", "import ringcomm as rc; rc.init(); print('not reached')"],
        cwd=tmp_path,
        env=job_environment(ELASTIC | {"RINGCOMM_SPARES": "1"}),
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "the job has 1 processes: at least one must be neither" in done.stderr, done.stderr


OF_ONE_HOST = """
import os
other = {"1": "direct", "2": "ring"}.get(os.environ["OMPI_COMM_WORLD_RANK"])
import ringcomm as rc
os.environ["RINGCOMM_ELASTIC"] = "0"
try:
    rc.init()
except rc.ConfigError as error:
    print(error, flush=True)
os.environ["RINGCOMM_ELASTIC"] = "1"
if other:
    os.environ["RINGCOMM_ALGORITHM"] = other
rc.init()
print("not reached", flush=True)
"""


def test_places_for_others_and_their_settings_are_checked_at_the_start(tmp_path):
    """When a process without a place takes one, a difference would end all ranks."""
    env = {"RINGCOMM_SPARES": "1", "RINGCOMM_RESERVES": "1"}
    job = run_script(3, OF_ONE_HOST, cwd=tmp_path, options=LAUNCHERS["ulfm"], env=env)
    assert job.code != 0
    assert job.output.count("only an elastic job has places for other ranks") == 3, job.output
    started = "started with RINGCOMM_ALGORITHM="
    text = f"init: rank 0 {started}auto, rank 1 {started}direct, rank 2 {started}ring"
    assert text in job.output, job.output
    assert "not reached" not in job.output


LATE = """
@rc.elastic.run
def train(state):
    while state.step < 10:
        if me == 2 and state.step == 5:
            die()
        if me == 1 and state.step == 5:
            time.sleep(6)  # longer than rank 0 waits for it
        step(state)

train(state)
assert rc.elastic.view().members == (1,)
assert state.x[0] == 5 * 6 + 5 * 2
print(f"rank {me} is done", flush=True)
"""


def test_a_rank_that_gives_up_while_it_heals_does_not_count_as_one_that_has_come(tmp_path):
    job = run_elastic(3, LATE, cwd=tmp_path, RINGCOMM_TIMEOUT_S="2")
    assert "rank 0 heals and has waited 2" in job.output, job.output
    assert "for ranks 1 of view 0" in job.output
    assert "rank 1 is done" in job.output, job.output


NOT_ELASTIC = """
@rc.elastic.run
def train(state):
    while state.step < 20:
        if me == 1 and state.step == 5:
            raise ValueError("boom")
        step(state)

train(state)
"""


def test_without_the_setting_a_failure_ends_the_job_and_a_warning_has_said_so(tmp_path):
    job = run_elastic(2, NOT_ELASTIC, cwd=tmp_path, RINGCOMM_ELASTIC="0")
    assert job.code != 0
    assert "RINGCOMM_ELASTIC is not 1, so a failure of a rank ends this job" in job.output
    assert "x rank 1 " in job.output


@pytest.mark.parametrize("launcher", at_length(list(LAUNCHERS), ["continuous"]))
def test_the_example_goes_on_when_its_ranks_are_killed(launcher, tmp_path):
    example = Path(__file__).parents[2] / "examples" / "elastic.py"
    kills = ("--kill", "2@30", "--kill", "0@60")
    job = run_job(4, example, *kills, cwd=tmp_path, options=LAUNCHERS[launcher], env=ELASTIC)
    assert "step 20: loss" in job.output
    # The loss is that of a run without deaths.
    assert "done: 100 steps, loss 0.1576, ranks left: 2" in job.output, job.output


KEPT = """
import pickle
state.keep_in("state")
if sys.argv[1] == "killed" and me == 0:
    pickle.loads = lambda data: die()

@rc.elastic.run
def train(state):
    print(f"began at {state.step}", flush=True)
    while state.step < (5 if sys.argv[1] == "first" else 8):
        step(state)

train(state)
print("trained", flush=True)
"""


def test_a_kept_commit_outlives_a_rank_that_dies_while_it_reads_it(tmp_path):
    """Those that are left must not begin anew, and write their first commit over it."""

    script = tmp_path / "kept.py"
    script.write_text(PRELUDE + KEPT)
    # Under a launcher that would end others: a job of one process says nothing of that.
    first = run_job(1, script, "first", cwd=tmp_path, env=ELASTIC)
    assert (first.code, first.output) == (0, "began at 0\ntrained\n")
    # One way for the launcher does: all that is asked here is of the ranks.
    job = run_job(3, script, "killed", cwd=tmp_path, options=ANY_EXIT[0], env=ELASTIC).output
    assert job.count("began at 5") == job.count("trained") == 2, job
    assert (tmp_path / "state.previous").exists()


OTHER_STATE = """
others = {
    "shape": lambda: rc.elastic.ArrayState(step=0, x=np.zeros(500)),
    "name": lambda: rc.elastic.ArrayState(step=0, y=np.zeros(1000)),
    "one value more": lambda: rc.elastic.ArrayState(step=0, x=np.zeros(1000), lr=0.1),
    "class": lambda: rc.elastic.ObjectState(step=0, x=np.zeros(1000)),
}
if me >= 3:
    state = others[sys.argv[1]]()

@rc.elastic.run
def train(state):
    while state.step < 20:
        if me == 1 and state.step == 5:
            die()
        step(state)

saved = []
rc.on_checkpoint(saved.append)
try:
    train(state)
except SystemExit as end:
    print(f"rank {me} ends with {end.code}", saved, flush=True)
    raise
print(f"rank {me} is done: {rc.rank()} of {rc.size()}, {state.x[0]:g}", flush=True)
"""
OTHERS = {
    "shape": "x is float64 (500,) here, and float64 (1000,) in the job",
    "name": "x is nothing here, and float64 (1000,) in the job",
    "one value more": "lr is a value here, and nothing in the job",
    "class": "its class is ObjectState here, and ArrayState in the job",
}


@pytest.mark.parametrize("other", at_length(list(OTHERS), ["name"]))
def test_a_spare_with_another_state_ends_alone_and_the_job_goes_on(other, tmp_path):
    """Two of them, one after the other."""
    script = tmp_path / "other.py"
    script.write_text(PRELUDE + OTHER_STATE)
    job = run_job(
        5, script, other, cwd=tmp_path, options=ANY_EXIT[0],
        env=ELASTIC | {"RINGCOMM_SPARES": "2", "RINGCOMM_TIMEOUT_S": "60"},
    ).output  # fmt: skip
    assert f"rank 0 is done: 0 of 2, {5 * 6 + 15 * 4}" in job, job
    assert "rank 2 is done: 1 of 2" in job
    assert f"its state is not that of the job: {OTHERS[other]}" in job
    assert job.count("The job goes on without it") == 2
    assert "raised RingcommError" in job


def test_a_job_with_too_few_ranks_because_the_spare_is_refused_says_so_and_ends_with_code_75(
    tmp_path,
):
    script = tmp_path / "other.py"
    script.write_text(PRELUDE + OTHER_STATE)
    job = run_job(
        4, script, "shape", cwd=tmp_path, options=ANY_EXIT[0],
        env=ELASTIC | {"RINGCOMM_SPARES": "1", "RINGCOMM_ELASTIC_MIN": "3"},
    ).output  # fmt: skip
    assert "The job goes on without it" in job, job
    assert "2 ranks are left, and RINGCOMM_ELASTIC_MIN is 3; no others have come" in job
    assert sorted(re.findall(r"^rank . ends with .*", job, re.MULTILINE)) == [
        "rank 0 ends with 75 [5]", "rank 2 ends with 75 [5]",
    ], job  # fmt: skip
    assert "is done" not in job
