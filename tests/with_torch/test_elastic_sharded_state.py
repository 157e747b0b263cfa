"""With shard_state=1 a part of the state is on each rank: no death of one rank loses any."""

import pytest
import torch
from harness import IS_MPICH, run_ranks, run_script
from storms import LAUNCHERS
from training_models import SMALL, assert_close, copies, data, fit, network, share, weights, wrap

import ringcomm.torch as hvd
from ringcomm.errors import ConfigError, RingcommError
from ringcomm.torch.zero import share_copies
from ringcomm.transport.membership.view import View

in_jobs = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


class Job:
    """Ranks as threads that train and commit, are then fewer or others, and go on."""

    def __init__(self, monkeypatch, size, make=adam, dtype=torch.float64):
        self.make, self.dtype = make, dtype
        self.models = copies(network(dtype), size)
        self.states = [None] * size
        self.view = View.first(size)
        monkeypatch.setattr(share_copies, "view", lambda: self.view)

    def run(self, batches, *, commits=True):
        """Train on these batches, from the last commit on."""
        size = len(self.states)

        def body(rank):
            state = self.states[rank]
            if state is None:
                model = self.models[rank]
                optimizer = wrap(model, self.make, shard_state=1)
                state = self.states[rank] = hvd.elastic.TorchState(model, optimizer, step=0)
            elif self.view.number:
                state.optimizer._reducer.begin_view()
                state.optimizer._shards.begin_view()
            state.sync()
            for batch in batches:
                fit(state.model, state.optimizer, share([batch], rank, size))
                state.step += 1
                if commits:
                    state.commit()
            return weights(state.model), state.optimizer.state_dict()

        return run_ranks(size, body, settings=SMALL)

    def lose(self, *ranks, n_new=0):
        """Go on without these ranks, and with new ones."""
        self.states = [s for rank, s in enumerate(self.states) if rank not in ranks]
        self.states += [None] * n_new
        self.models = [s.model for s in self.states if s is not None]
        self.models += copies(network(self.dtype), n_new)
        n = self.view.number + 1
        self.view = View(n, tuple(range(len(self.states))))


def one_process(batches, make, dtype=torch.float64):
    model = network(dtype)
    optimizer = make(model.parameters())
    fit(model, optimizer, batches)
    return weights(model), optimizer.state_dict()


@pytest.mark.parametrize("make", [adam, momentum])
@pytest.mark.parametrize("lost", [[0], [1], [3], [0, 2]])
def test_the_parts_of_lost_ranks_are_dealt_to_those_that_are_left(lost, make, monkeypatch):
    batches = data(6, 12)
    job = Job(monkeypatch, 4, make)
    job.run(batches[:2])
    job.lose(*lost)
    job.run(batches[2:4])
    job.lose(0, n_new=2)
    ends = job.run(batches[4:])
    expected, its_state = one_process(batches, make)
    for end, state in ends:
        assert_close([end], expected, 1e-10)
        for index, each in its_state["state"].items():
            for key, want in each.items():
                got = state["state"][index][key]
                torch.testing.assert_close(got, want, rtol=0, atol=1e-10)


def test_what_was_not_committed_is_made_again(monkeypatch):
    batches = data(4, 12)
    job = Job(monkeypatch, 4)
    job.run(batches[:2])
    job.run(batches[2:], commits=False)
    job.lose(2)
    for end, _ in job.run(batches[2:]):
        assert_close([end], one_process(batches, adam)[0], 1e-10)


def test_a_loss_before_the_first_commit_of_a_view_takes_no_more(monkeypatch):
    batches = data(4, 12)
    job = Job(monkeypatch, 4)
    job.run(batches[:2])
    job.lose(1)
    job.run([])
    job.lose(1)  # which had the only copy of the part of rank 1 until it was dealt
    for end, _ in job.run(batches[2:]):
        assert_close([end], one_process(batches, adam)[0], 1e-10)


def test_who_is_behind_by_a_commit_gives_the_part_that_it_had_copied_for_it(monkeypatch):
    batches = data(4, 12)
    job = Job(monkeypatch, 3)
    job.run(batches[:2])
    state = job.states[2]
    kept, whole = state._n_commits, state.optimizer._copies._whole
    job.run(batches[2:3])
    state._n_commits, state.optimizer._copies._whole = kept, whole  # interrupted in the commit
    job.lose(1)
    for end, _ in job.run(batches[3:]):
        assert_close([end], one_process(batches, adam)[0], 1e-10)


def test_if_the_rank_that_is_ahead_is_lost_before_it_has_sent_its_commit_the_one_before_counts(
    monkeypatch,
):
    batches = data(4, 12)
    job = Job(monkeypatch, 4)
    job.run(batches[:2])
    kept = [(state._n_commits, state.optimizer._copies._whole) for state in job.states]
    with monkeypatch.context() as patch:
        patch.setattr(hvd.elastic.TorchState, "save", lambda _: None)  # cut off before it
        job.run(batches[2:3])
    for state, (n, whole) in list(zip(job.states, kept, strict=True))[1:]:
        state._n_commits, state.optimizer._copies._whole = n, whole
    job.lose(2)
    with monkeypatch.context() as patch:
        patch.setattr(hvd.elastic.TorchState, "receive", fails)
        with pytest.raises(RuntimeError, match="a rank is lost"):
            job.run([])
    job.lose(0)
    for end, _ in job.run(batches[2:]):
        assert_close([end], one_process(batches, adam)[0], 1e-10)


def test_a_commit_that_nobody_has_completed_does_not_count(monkeypatch):
    batches = data(4, 12)
    job = Job(monkeypatch, 3)
    job.run(batches[:2])
    with monkeypatch.context() as patch:
        patch.setattr(share_copies.collectives, "barrier", fails)  # its copies have come
        with pytest.raises(RuntimeError, match="a rank is lost"):
            job.run(batches[2:3])
    job.lose(1)
    for end, _ in job.run(batches[2:]):
        assert_close([end], one_process(batches, adam)[0], 1e-10)


def fails(*_, **__):
    raise RuntimeError("a rank is lost")


@pytest.mark.parametrize("n_stay", [1, 2, 3])
def test_ranks_that_are_to_leave_together_give_their_parts_to_those_that_stay(n_stay, monkeypatch):
    batches = data(6, 12)
    job = Job(monkeypatch, 4)
    job.run(batches[:2])
    assert {each._fewest_ranks for each in job.states} == {3}
    monkeypatch.setattr(share_copies, "ranks_to_stay", lambda _: n_stay)  # as request_scale() asks
    job.run(batches[2:3])
    assert {each._fewest_ranks for each in job.states} == {n_stay}
    monkeypatch.setattr(share_copies, "ranks_to_stay", lambda n: n)
    job.lose(*range(n_stay, 4))
    for end, _ in job.run(batches[3:]):
        assert_close([end], one_process(batches, adam)[0], 1e-10)


def test_masters_of_16_bit_weights_are_dealt_too(monkeypatch):
    batches = data(4, 12, torch.bfloat16)
    job = Job(monkeypatch, 4, dtype=torch.bfloat16)
    job.run(batches[:2])
    before = job.run([])[0][1]
    job.lose(3)
    after = job.run([])[0][1]
    for index, each in before["state"].items():
        for key, value in each.items():
            assert torch.equal(after["state"][index][key], value), key


def test_a_lost_part_whose_copy_is_lost_is_the_same_error_on_all_ranks(monkeypatch):
    job = Job(monkeypatch, 4)
    job.run(data(2, 12))
    job.lose(1, 2)
    with pytest.raises(RingcommError, match=r"of its 4 shares in view 0, those of ranks \[1\] are"):
        job.run([])


def test_without_a_state_a_loss_is_an_error_at_the_next_step():
    model = network()

    def body(rank):
        optimizer = wrap(model, shard_state=1)
        fit(model, optimizer, data(1, 1))
        optimizer._shards.begin_view()
        with pytest.raises(RingcommError, match="Pass the optimizer to a TorchState"):
            fit(model, optimizer, data(1, 1))
        with pytest.raises(RingcommError, match="Pass the optimizer to a TorchState"):
            optimizer.state_dict()

    run_ranks(1, body)


def test_a_state_with_a_sharded_optimizer_is_kept_in_no_file(tmp_path):
    def body(rank):
        model = network()
        state = hvd.elastic.TorchState(model, wrap(model, shard_state=1), step=0)
        with pytest.raises(ConfigError, match=r"keep_in: optimizer has shard_state=1.*Checkpoint"):
            state.keep_in(tmp_path / "state")
        state.commit()

    run_ranks(2, body)
    assert not list(tmp_path.iterdir())


TRAINING = """
import os, signal, sys
import torch
import ringcomm as rc
import ringcomm.torch as hvd

hvd.init()
torch.set_num_threads(1)
STEPS, me = 24, hvd.rank()
KILLS = {tuple(each.split("@")) for each in sys.argv[2:]}
mse = torch.nn.functional.mse_loss

def data(step, member):
    random = torch.Generator().manual_seed(step * 100 + member)
    like = {"generator": random, "dtype": torch.float64}
    return torch.randn(8, 16, **like), torch.randn(8, 4, **like)

def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 31), torch.nn.Tanh(), torch.nn.Linear(31, 4))
    model = model.double()
    if sys.argv[1] == "adam":
        return model, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

def die_if(step, moment):
    if (str(me), f"{step}:{moment}") in KILLS:
        os.kill(os.getpid(), signal.SIGKILL)

model, plain = make()
optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), shard_state=1)
state = hvd.elastic.TorchState(model, optimizer, step=0, history=[])

@hvd.elastic.run
def train(state):
    while state.step < STEPS:
        members = rc.elastic.view().members
        x, y = data(state.step, me)
        optimizer.zero_grad()
        loss = mse(model(x), y)
        die_if(state.step, "forward")
        loss.backward()
        die_if(state.step, "backward")
        optimizer.step()
        die_if(state.step, "stepped")
        if (str(me), f"{state.step}:shrinks") in KILLS:
            rc.elastic.request_scale(2)
        state.step += 1
        state.history = [*state.history, (members, rc.allgather_object(loss.item()))]
        state.commit()
        die_if(state.step, "committed")

train(state)
assert optimizer.n_steps == STEPS
twin, plain = make()
for step, (members, losses) in enumerate(state.history):
    plain.zero_grad()
    for member, its in zip(members, losses, strict=True):
        x, y = data(step, member)
        loss = mse(twin(x), y)
        assert abs(loss.item() - its) < 1e-10
        (loss / len(members)).backward()
    plain.step()
for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
    assert torch.allclose(mine, its, rtol=0, atol=1e-10)
theirs = plain.state_dict()["state"]
for index, mine in optimizer.state_dict()["state"].items():
    for key, value in mine.items():
        assert torch.allclose(value, theirs[index][key], rtol=0, atol=1e-10), (index, key)
print(f"equal on {hvd.size()} ranks", flush=True)
"""


def run_training(kills, cwd, *, n=4, make="adam", launcher="ulfm", **environment):
    job = run_script(
        n, TRAINING, make, *kills, cwd=cwd, options=LAUNCHERS[launcher],
        env={"RINGCOMM_ELASTIC": "1"} | environment,
    )  # fmt: skip
    return job.output


MOMENTS = ("forward", "backward", "stepped", "committed")
DEATHS = [[f"{rank}@9:{when}"] for rank in range(4) for when in MOMENTS]
TWO = [
    ["0@5:stepped", "2@5:backward"],
    ["3@5:forward", "0@7:stepped"],
    ["1@5:forward", "3@5:committed"],
]


@pytest.mark.at_length  # a job takes 10 s of a core; what is dealt anew is shown by threads above
@in_jobs
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("kills", [*DEATHS, *TWO])
def test_state_and_losses_after_deaths_are_those_of_an_unfailed_run_with_the_same_batches(
    kills, launcher, tmp_path
):
    output = run_training(kills, tmp_path, launcher=launcher)
    n = 4 - len(kills)
    assert output.count(f"equal on {n} ranks") == n, output


@pytest.mark.at_length
@in_jobs
@pytest.mark.parametrize("make", ["adam", "sgd"])
def test_a_spare_gets_the_part_of_a_lost_rank(make, tmp_path):
    output = run_training(["1@9:stepped"], tmp_path, make=make, RINGCOMM_SPARES="1")
    assert output.count("equal on 3 ranks") == 3, output


@in_jobs
@pytest.mark.at_length  # threads show it in the gate
def test_two_ranks_may_leave_a_job_at_once_that_is_to_be_smaller(tmp_path):
    output = run_training(["1@9:shrinks"], tmp_path)
    assert output.count("equal on 2 ranks") == 2, output


@in_jobs
@pytest.mark.at_length  # threads show it in the gate
def test_if_a_rank_and_the_one_after_it_are_lost_at_once_all_others_say_what_is_lost(tmp_path):
    output = run_training(["1@9:stepped", "2@9:stepped"], tmp_path)
    text = "of its 4 shares in view 0, those of ranks [1] are lost"
    assert output.count(text) >= 2, output
    assert "equal" not in output
