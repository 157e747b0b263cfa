"""What scripts do around an optimizer: each does the same on N ranks as in one process."""

import copy
import math
import pickle

import pytest
import torch
from harness import at_length, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim import lr_scheduler, swa_utils
from training_models import (
    BATCH,
    SMALL,
    assert_equals_one_process,
    data,
    fit,
    models,
    network,
    on_replicas,
    seeded,
    sgd,
    traced_of_ringcomm,
    wrap,
)

import ringcomm as rc

SIZES = pytest.mark.parametrize("size", at_length([1, 2, 3, 4], [2]))


# --- optimizers ---------------------------------------------------------------------------------
class Required(torch.optim.Optimizer):
    """SGD whose constructor has arguments without defaults, by position and by keyword."""

    def __init__(self, params, rate, /, decay, *, note):
        assert note == "mine"
        super().__init__(params, {"rate": rate, "decay": decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["decay"]).sub_(p.grad, alpha=group["rate"])
        return loss


def required(parameters):
    return Required(parameters, 0.05, 0.01, note="mine")


optim = torch.optim
OPTIMIZERS = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=1e-3, amsgrad=True),
    "Adam foreach": lambda p: optim.Adam(p, lr=1e-3, foreach=True),
    "Adam fused": lambda p: optim.Adam(p, lr=1e-3, fused=True),
    "Adam of a tensor rate": lambda p: optim.Adam(p, lr=torch.tensor(1e-3, dtype=torch.float64)),
    "Adamax": lambda p: optim.Adamax(p, lr=1e-3),
    "AdamW maximize": lambda p: optim.AdamW(p, lr=1e-4, maximize=True),
    "ASGD": lambda p: optim.ASGD(p, lr=0.01, t0=2),
    "NAdam": lambda p: optim.NAdam(p, lr=1e-3),
    "RAdam": lambda p: optim.RAdam(p, lr=1e-3),
    "required arguments": required,
    "RMSprop": lambda p: optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "SGD fused": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "SGD nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
}


@SIZES
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, size):
    batches = data(at_length(20, 10), size)
    assert_equals_one_process(size, make=OPTIMIZERS[name], batches=batches, tolerance=1e-10)


@SIZES
def test_two_groups_with_rates_of_their_own(size):
    def make(parameters):
        parameters = list(parameters)
        groups = [{"params": parameters[:2], "lr": 0.1}, {"params": parameters[2:]}]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.5)

    assert_equals_one_process(size, make=make)


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_a_copy_of_an_optimizer_with_required_arguments_goes_on(copied):
    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:4])
        other, continued = copied((model, optimizer))
        assert type(continued).__name__ == "Required"
        assert continued.defaults["rate"] == 0.05
        fit(other, continued, batches[4:])
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data.copy_(q.data)

    assert_equals_one_process(3, train, make=required)


class Grown(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.later = network(), nn.Linear(3, 3).double()

    def forward(self, x):
        return self.later(self.first(x))


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_a_copy_after_parameters_were_added_has_them(copied):
    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:3])
        optimizer.add_param_group({"params": list(model.later.parameters()), "lr": 0.2})
        fit(model, optimizer, batches[3:5])
        other, continued = copied((model, optimizer))
        fit(other, continued, batches[5:])
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data.copy_(q.data)

    assert_equals_one_process(2, train, model=seeded(Grown), make=lambda p: sgd(list(p)[:6]))


@SIZES
def test_a_state_saved_after_parameters_were_added_is_loaded_into_as_many(size):
    def train(model, optimizer, batches):
        late = nn.Parameter(torch.ones(3, dtype=torch.float64))
        optimizer.add_param_group({"params": [late], "lr": 0.2})
        for number, (x, y) in enumerate(batches):
            optimizer.zero_grad()
            mse_loss(model(x) * late, y).backward()
            optimizer.step()
            if number == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with torch.no_grad():
            model[-1].bias.copy_(late)  # which is compared

    assert_equals_one_process(size, train)


# --- learning rates -----------------------------------------------------------------------------
SCHEDULES = {
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: 1 / (1 + k)),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 8, power=2),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@SIZES
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules(name, size):
    rates = []

    def train(model, optimizer, batches):
        schedule = SCHEDULES[name](optimizer)
        found = []
        for batch in batches:
            fit(model, optimizer, [batch])
            schedule.step()
            found.append([optimizer.param_groups[0][key] for key in ("lr", "momentum")])
        rates.append(found)

    assert_equals_one_process(size, train)
    assert len(rates) == size + 1
    assert all(found == rates[0] for found in rates)
    assert len({lr for lr, _ in rates[0]}) > 1


@pytest.mark.parametrize("size", at_length([2, 3], [2]))
def test_a_schedule_that_looks_at_the_loss_of_all(size):
    rates = []

    def train(model, optimizer, batches):
        schedule = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        for x, y in batches:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            is_alone = len(x) > BATCH
            schedule.step(loss.detach() if is_alone else rc.allreduce(loss.detach(), rc.AVERAGE))
        rates.append(optimizer.param_groups[0]["lr"])

    assert_equals_one_process(size, train, batches=data(20, size))
    assert len(set(rates)) == 1
    assert rates[0] < sgd(network().parameters()).defaults["lr"]


@pytest.mark.parametrize("copied", [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy])
def test_a_copy_with_its_schedule_goes_on(copied):
    def train(model, optimizer, batches):
        schedule = lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        for batch in batches[:3]:
            fit(model, optimizer, [batch])
            schedule.step()
        other, continued, scheduled = copied((model, optimizer, schedule))
        assert scheduled.optimizer is continued
        for batch in batches[3:]:
            fit(other, continued, [batch])
            scheduled.step()
        assert continued.param_groups[0]["lr"] == 0.05 / 2 ** (len(batches) // 2)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.data.copy_(q.data)

    assert_equals_one_process(2, train)


@SIZES
def test_averaged_weights(size):
    def train(model, optimizer, batches):
        averaged = swa_utils.AveragedModel(model)
        schedule = swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
        for batch in batches:
            fit(model, optimizer, [batch])
            averaged.update_parameters(model)
            schedule.step()
        for p, q in zip(model.parameters(), averaged.parameters(), strict=True):
            p.data.copy_(q.data)

    assert_equals_one_process(size, train)


# --- precision ----------------------------------------------------------------------------------
def bfloat16_step(model, optimizer, batches, backward):
    for x, y in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = mse_loss(model(x).float(), y)
        backward(loss)
        optimizer.step()


@SIZES
def test_autocast_to_bfloat16(size):
    """It has 8 bits: ranks round their parts of a sum where one process rounds it once."""
    assert_equals_one_process(
        size,
        lambda model, optimizer, batches: bfloat16_step(
            model, optimizer, batches, lambda loss: loss.backward()
        ),
        model=network(torch.float32),
        batches=data(8, size, torch.float32),
        tolerance=2**-7,
    )


@pytest.mark.parametrize("size", at_length([2, 3], [2]))
def test_autocast_to_float16_with_a_grad_scaler(size):
    batches = data(10, size, torch.float32)
    batches[4][0][0, 0] = 1e6  # too large for float16, in the first rank's share
    scales = []

    def train(model, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for x, y in batches:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = mse_loss(model(x).float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
        scales.append(scaler.get_scale())

    assert_equals_one_process(
        size, train, model=network(torch.float32), batches=batches, tolerance=2**-8
    )
    assert scales == [2.0**9] * (size + 1)  # all have skipped that step, and no other


@SIZES
def test_a_grad_scaler_with_accumulation(size):
    def train(model, optimizer, batches):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for x, y in (first, second):
                scaler.scale(mse_loss(model(x), y) / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            scaler.step(optimizer)
            scaler.update()

    assert_equals_one_process(size, train, backward_passes_per_step=2)


@SIZES
def test_parameters_of_several_dtypes(size):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Linear(5, 8).double()
            self.narrow = nn.Linear(8, 3)

        def forward(self, x):
            return self.narrow(torch.tanh(self.wide(x)).float()).double()

    assert_equals_one_process(size, model=seeded(Mixed), tolerance=1e-5)


# --- clipping and accumulation ------------------------------------------------------------------
CLIPS = {
    "value": lambda p: nn.utils.clip_grad_value_(p, 0.02),
    "norm": lambda p: nn.utils.clip_grad_norm_(p, 0.1),
    "largest": lambda p: nn.utils.clip_grad_norm_(p, 0.02, norm_type=math.inf),
    "foreach": lambda p: nn.utils.clip_grad_norm_(p, 0.1, foreach=True),
    "each": lambda p: [nn.utils.clip_grad_norm_([each], 0.05) for each in p],
}


@pytest.mark.parametrize("size", at_length([2, 3], [2]))
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", CLIPS)
def test_clipping(name, passes, size):
    changed = []

    def train(model, optimizer, batches):
        for at in range(0, len(batches), passes):
            optimizer.zero_grad()
            for x, y in batches[at : at + passes]:
                mse_loss(model(x), y).backward()
            before = [p.grad.clone() for p in model.parameters()]
            CLIPS[name](list(model.parameters()))
            after = [p.grad for p in model.parameters()]
            changed.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
            optimizer.step()

    assert_equals_one_process(size, train, backward_passes_per_step=passes)
    assert any(changed)


# --- models -------------------------------------------------------------------------------------
class Tied(nn.Module):
    """A language model whose embedding is its output layer as well."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.mix = nn.GRU(6, 6, batch_first=True)
        self.out = nn.Linear(6, 20)
        self.out.weight = self.table.weight

    def forward(self, words):
        hidden, _ = self.mix(self.table(words))
        return self.out(hidden[:, -1])


def sentences(steps, size):
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, 20, (steps, size * BATCH, 5), generator=generator)
    return [(each[:, :4], each[:, 4]) for each in words]


@SIZES
@pytest.mark.parametrize("set_to_none", [True, False])
def test_tied_weights_of_a_recurrent_model(size, set_to_none):
    def train(model, optimizer, batches):
        for words, answer in batches:
            optimizer.zero_grad(set_to_none=set_to_none)
            cross_entropy(model(words), answer).backward()
            optimizer.step()
        assert model.out.weight is model.table.weight

    assert_equals_one_process(size, train, model=seeded(Tied).double(), batches=sentences(6, size))


@SIZES
def test_parametrized_and_normalized_weights(size):
    def make():
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)),
            nn.LayerNorm(8),
            nn.PReLU(),
            nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
            nn.Linear(8, 3),
        ).double()

    assert_equals_one_process(size, model=seeded(make), tolerance=1e-11)


@pytest.mark.parametrize("size", at_length([2, 3], [2]))
def test_channels_last_in_bfloat16_with_frozen_layers_and_accumulation(size):
    def make():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 2))
        model[0].requires_grad_(False)
        return model.to(memory_format=torch.channels_last)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, size * 2, 3, 8, 8, generator=generator)
    y = torch.randn(8, size * 2, 2, 3, 3, generator=generator)

    def train(model, optimizer, batches):
        frozen = model[0].weight.clone()
        for first, second in zip(batches[::2], batches[1::2], strict=True):
            optimizer.zero_grad()
            for a, b in (first, second):
                with torch.autocast("cpu", torch.bfloat16):
                    out = model(a.to(memory_format=torch.channels_last))
                mse_loss(out.float(), b).backward()
            assert model[2].weight.grad.is_contiguous(memory_format=torch.channels_last)
            assert model[0].weight.grad is None
            optimizer.step()
        assert torch.equal(model[0].weight, frozen)

    assert_equals_one_process(
        size,
        train,
        model=seeded(make),
        batches=list(zip(x, y, strict=True)),
        backward_passes_per_step=2,
        tolerance=2**-7,
    )


def test_a_model_that_is_wrapped_after_training_alone_goes_on_with_its_state():
    """Fine-tuning: the state that one process has made is that of all ranks."""

    def make(parameters):
        return torch.optim.Adam(parameters, lr=1e-3)

    alone, *replicas = models(3)
    first, then = data(4, 2), data(8, 2)[4:]
    reference = make(alone.parameters())
    fit(alone, reference, first + then)

    def body(rank):
        model = replicas[rank]
        plain = make(model.parameters())
        fit(model, plain, first)
        wrapped = wrap(model, lambda _: plain)
        fit(model, wrapped, [tuple(part.chunk(2)[rank] for part in batch) for batch in then])
        return [p.detach().clone() for p in model.parameters()]

    for got in run_ranks(2, body, settings=SMALL):
        for mine, want in zip(got, alone.parameters(), strict=True):
            assert (mine - want).abs().max() <= 1e-10 * want.abs().max()


# --- torch.compile ------------------------------------------------------------------------------
@pytest.mark.parametrize("shard_state", [0, 1])
def test_torch_would_trace_no_code_of_ringcomm_in_a_step(shard_state):
    def body(rank, model, optimizer, mine):
        fit(model, optimizer, mine[:1])
        assert traced_of_ringcomm(lambda: fit(model, optimizer, mine[1:])) == []
        assert optimizer.step._torchdynamo_disable  # nor is it traced within who calls it

    on_replicas(1, body, steps=3, shard_state=shard_state)


@pytest.mark.at_length  # torch takes 5 s of a core to load what compiles
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, as it compiles
@pytest.mark.parametrize("shard_state", [0, 1])
def test_a_whole_compiled_step(shard_state):
    """One rank: more of them are in mpi/torch_parallelism_suite.py, as torch compiles in turn.

    Torch traces the plain optimizer, but no code of ringcomm: there the step has fewer frames.
    """
    n_frames = []

    def train(model, optimizer, batches):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        @torch.compile(backend="eager")
        def step(x, y):
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()

        for x, y in batches:
            step(x, y)
        n_frames.append(torch._dynamo.utils.counters["frames"]["total"])

    assert_equals_one_process(1, train, shard_state=shard_state)
    alone, distributed = n_frames
    assert distributed < alone
