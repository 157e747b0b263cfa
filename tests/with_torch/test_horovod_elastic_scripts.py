"""Scripts for Horovod's elastic mode run unchanged, and are right after ranks have died."""

import json

import pytest
from harness import IS_MPICH, at_length, run_job
from storms import LAUNCHERS

pytestmark = pytest.mark.skipif(IS_MPICH, reason="MPICH ends a job when a rank dies")

PRELUDE = """
import json, os, signal, sys
import torch
import horovod.torch as hvd

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
me = hvd.rank()
kills = json.loads(sys.argv[1])

def die_if(*moment):
    if [me, *moment] in kills:
        os.kill(os.getpid(), signal.SIGKILL)
"""

DIGITS = """
from torch.utils.data import DataLoader, TensorDataset

N, EPOCHS, LR = 203, 2, 0.05
like = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(3)}
x, y = torch.randn(N, 12, **like), torch.randint(0, 5, (N,), generator=like["generator"])
dataset = TensorDataset(torch.arange(N), x, y)
sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=4, sampler=sampler)

def make():
    torch.manual_seed(me)
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Tanh(), torch.nn.Linear(8, 5))
    return model.double()

model = make()
optimizer = torch.optim.SGD(model.parameters(), lr=LR * hvd.size(), momentum=0.9)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
twin = make()
twin.load_state_dict(model.state_dict())
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

def on_state_reset():
    for param_group in optimizer.param_groups:
        param_group["lr"] = LR * hvd.size()

@hvd.elastic.run
def train(state):
    while state.epoch < EPOCHS:
        state.model.train()
        for batch_idx, (indices, data, target) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(data), target)
            die_if(state.epoch, state.batch, "in forward")
            loss.backward()
            state.optimizer.step()
            die_if(state.epoch, state.batch, "after step")
            seen = hvd.allgather_object(indices.tolist())
            state.history = state.history + [(state.epoch, optimizer.param_groups[0]["lr"], seen)]
            state.sampler.record_batch(batch_idx, loader.batch_size)
            state.batch += 1
            if state.batch % EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()
            die_if(state.epoch, state.batch - 1, "after commit")
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()

state = hvd.elastic.TorchState(
    model=model, optimizer=optimizer, epoch=0, batch=0, sampler=sampler, history=[]
)
state.register_reset_callbacks([on_state_reset])
train(state)

plain = torch.optim.SGD(twin.parameters(), lr=0, momentum=0.9)
counts = [[0] * N for _ in range(EPOCHS)]
for epoch, lr, seen in state.history:
    assert lr == LR * len(seen), (lr, len(seen))
    plain.param_groups[0]["lr"] = lr
    plain.zero_grad()
    for indices in seen:
        loss = torch.nn.functional.cross_entropy(twin(x[indices]), y[indices])
        (loss / len(seen)).backward()
        for index in indices:
            counts[epoch][index] += 1
    plain.step()
off = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters()))
print("RESULT", json.dumps({
    "off": off, "sizes": [len(seen) for _, _, seen in state.history],
    "missing": [c.count(0) for c in counts], "double": [sum(n - 1 for n in c if n) for c in counts],
    "bytes": b"".join(p.detach().numpy().tobytes() for p in model.parameters()).hex(),
}), flush=True)
"""


def results_of(script, kills, *, cwd, n=4, launcher="ulfm"):
    (cwd / "train.py").write_text(PRELUDE + script)
    arguments = ("-m", "ringcomm.torch.as_horovod", "train.py", json.dumps(kills))
    environment = {"RINGCOMM_ELASTIC": "1"}
    job = run_job(n, *arguments, cwd=cwd, options=LAUNCHERS[launcher], env=environment)
    lines = [line for line in job.output.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == n - len(kills), job.output
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.mark.parametrize("every", at_length([1, 3], [3]))
def test_digits_are_learned_from_each_sample_although_ranks_die(every, tmp_path):
    kills = [
        [0, 0, 9, "after step"], [2, 1, 4, "after commit"],
        *at_length([[3, 0, 3, "in forward"]], []),  # as in other tests
    ]  # fmt: skip
    script = DIGITS.replace("EVERY", str(every))
    n = 1 + len(kills)
    (result,) = results_of(script, kills, cwd=tmp_path, n=n)
    assert result["off"] < 1e-10
    assert result["missing"] == [0, 0]
    # Each new view deals the rest evenly, so at most size - 1 samples come twice for that. With
    # a commit every few batches, those since the last one are undone, and come again.
    assert result["double"][0] <= 3 + 2 + 1
    assert result["sizes"][0] == n
    assert result["sizes"][-1] == 1


@pytest.mark.at_length  # 2 ranks with torch; the test above deals samples, too
def test_without_a_death_the_sampler_deals_each_sample_and_pads_the_shares(tmp_path):
    results = results_of(DIGITS.replace("EVERY", "1"), [], cwd=tmp_path, n=2)
    assert [r["double"] for r in results] == [[1, 1]] * 2
    assert [r["missing"] for r in results] == [[0, 0]] * 2
    assert len({r["bytes"] for r in results}) == 1


LOOP = """
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt

STEPS = 30

class Weights(hvd.elastic.ObjectState):
    "Weights of one's own, which sync() takes from rank 0."

    def __init__(self, weights, **values):
        self.weights = weights
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, **values)

    def save(self):
        self._copy = self.weights.clone()
        super().save()

    def restore(self):
        self.weights = self._copy.clone()
        super().restore()

    def sync(self):
        self.weights = hvd.broadcast(self.weights, root_rank=0, name="weights")
        super().sync()

    def reset(self):
        resets.append("reset")

resets, caught = [], []

@hvd.elastic.run
def train(state, limit):
    while state.step < limit:
        try:
            total = hvd.allreduce(torch.full((5,), float(state.step)), op=hvd.Sum)
        except HorovodInternalError as error:
            caught.append(type(error).__name__)
            raise
        die_if(state.step, "after sum")
        state.weights = state.weights + total
        state.sizes = state.sizes + [hvd.size()]
        state.step += 1
        if state.step == 20 and "interrupt" not in resets:
            resets.append("interrupt")
            raise HostsUpdatedInterrupt(False)
        if state.step % 4 == 0:
            state.commit()
            die_if(state.step, "after commit")

state = Weights(torch.full((5,), float(me)), step=0, sizes=[])
plain = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=me)
plain.sync()
assert plain.epoch == 0 and isinstance(state, hvd.elastic.State)
state.register_reset_callbacks([lambda: resets.append(hvd.size())])
train(state, limit=STEPS)
expected = sum(step * n for step, n in enumerate(state.sizes))
assert len(state.sizes) == STEPS and state.weights.tolist() == [expected] * 5, state.weights
print("RESULT", json.dumps({"sizes": state.sizes, "resets": resets, "caught": caught}), flush=True)
"""


@pytest.mark.at_length
def test_a_state_with_a_sync_of_its_own_gets_the_values_of_rank_0(tmp_path):
    kills = [[0, 8, "after commit"], [2, 17, "after sum"]]
    results = results_of(LOOP, kills, cwd=tmp_path)
    assert len({str(r["sizes"]) for r in results}) == 1
    sizes = results[0]["sizes"]
    assert sizes[:8] == [4] * 8
    assert sizes[8:16] == [3] * 8
    assert sizes[16:] == [2] * 14
    for each in results:
        assert [r for r in each["resets"] if r != "reset"] == [3, 2, "interrupt", 2]
        assert each["resets"].count("reset") == 3
        assert set(each["caught"]) <= {"PeerFailedError"}


@pytest.mark.parametrize("is_alike", [True, False])
def test_samples_of_a_lost_rank_count_only_if_all_ranks_record_alike(is_alike):
    from ringcomm.torch.elastic.sampler import Deal, Position

    deal = Deal(20, shuffle=True, seed=1)
    first = Position(2, frozenset({4, 5}), size=3)
    shares = deal.shares(first)
    assert [len(share) for share in shares] == [6, 6, 6]
    of = [Position(2, first.done, r, 3, ((0, 2 if is_alike or r == 0 else 3),)) for r in (0, 1)]
    united = deal.united(of, [True, True])  # rank 2 is lost
    mine = {*shares[0][:2], *shares[1][: 2 if is_alike else 3]}
    assert united.done == first.done | mine | (set(shares[2][:2]) if is_alike else set())
    assert (united.epoch, united.places) == (2, ())


def test_shares_are_equally_long_even_if_there_are_fewer_samples_than_ranks():
    from ringcomm.torch.elastic.sampler import Deal, Position

    shares = Deal(5, shuffle=False, seed=0).shares(Position(0, frozenset({0, 1, 2, 3}), size=4))
    assert shares == [[4], [4], [4], [4]]
    assert Deal(1, shuffle=False, seed=0).shares(Position(0, frozenset({0}), size=2)) == [[], []]
