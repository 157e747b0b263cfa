"""Modes, state, schedules and refusals of ps.DistributedOptimizer."""

import copy
import gc
import threading
import weakref

import pytest
import torch
from ps_optimizer_wrap import on_workers, wrap
from ps_ranks_as_threads import deadline, require_names, run_workers
from torch import nn
from torch.nn.functional import mse_loss
from training_models import assert_close, copies, data, fit, network, sgd, share, weights

import ringcomm as rc
from ringcomm import ps as core_ps
from ringcomm.ps import evaluation
from ringcomm.ps.job import session
from ringcomm.torch import ps
from ringcomm.torch.ps import worker_counts

pytestmark = pytest.mark.usefixtures("odd_cuts")


def adam(parameters):
    return torch.optim.Adam(parameters, lr=1e-3)


def backward(model, n=4):
    model(torch.ones(n, 5, dtype=torch.float64)).square().mean().backward()


# --- modes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_is_further_ahead_than_ssp_allows_and_the_bound_is_reached(bound):
    n_steps, lock, clocks, leads = 8, threading.Lock(), [0, 0], []
    may_go = threading.Semaphore(0)  # of the slow worker

    def body(rank, model, optimizer):
        for step in range(n_steps):
            if rank == 1:
                assert may_go.acquire(timeout=60)
            with lock:
                leads.append(clocks[rank] - min(clocks))
            optimizer.zero_grad()
            backward(model)
            if rank == 0 and step >= bound:
                may_go.release()  # so that the fast one is held up by the slow one alone
            with lock:
                clocks[rank] += 1  # before the servers hear of it: never less than they know
            optimizer.step()
        for _ in range(bound):
            may_go.release()

    on_workers(2, body, mode=ps.SSP(bound))
    # A clock is counted just before its step ends: one more than the servers know.
    assert max(leads) <= bound + 1
    assert max(leads) >= bound


@pytest.mark.parametrize("bound", [0, 2])
def test_ssp_waits_for_a_worker_that_stands_still(bound):
    is_over = threading.Event()

    def body(rank):
        model = network()
        optimizer = wrap(model, mode=ps.SSP(bound))
        if rank == 1:
            assert is_over.wait(60)
            return None
        try:
            for _ in range(bound):
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
            optimizer.zero_grad()
            backward(model)
            with deadline(0.5), pytest.raises(rc.CommTimeoutError, match="waits for worker 1"):
                optimizer.step()
        finally:
            is_over.set()
        return session().clock

    assert run_workers(2, body) == [bound + 1, None]


def test_async_pushes_are_updates_by_themselves():
    def body(rank, model, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            model[0].bias.sum().backward()
            optimizer.step()
        rc.barrier()
        optimizer.zero_grad()
        optimizer.step()  # fetches what the others have pushed
        return model[0].bias.detach().clone()

    start = network()[0].bias.detach()
    got = on_workers(2, body, 2, mode="async", make=lambda p: torch.optim.SGD(p, lr=0.01))
    for bias in got:
        torch.testing.assert_close(bias, start - 0.01 * 10)


def test_first_of_drops_late_gradients_and_says_so():
    first_done = threading.Event()

    def body(rank, model, optimizer):
        applied = []
        if rank == 1:
            assert first_done.wait(60)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            applied.append(optimizer.was_applied)
            if rank == 0:
                first_done.set()
                return applied
        return applied

    first, second = on_workers(2, body, mode=ps.FirstOf(1))
    assert first == [True]
    assert second == [False, True]  # late, and with the values of now in time again


@pytest.mark.parametrize("end", ["n_rounds", "stop"])
def test_workers_of_first_of_meet_at_a_number_of_rounds_or_once_the_chief_stops(end):
    n_rounds, half_done = 6, threading.Event()

    def goes_on(optimizer):
        return optimizer.n_rounds < n_rounds if end == "n_rounds" else not ps.should_stop()

    def body(rank, model, optimizer):
        n_steps = 0
        if rank == 2:
            assert half_done.wait(60)
        while goes_on(optimizer):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            n_steps += 1
            if optimizer.n_rounds == n_rounds // 2:
                half_done.set()
            if ps.is_chief() and end == "stop" and n_steps == n_rounds:
                ps.stop()
        rc.barrier()
        optimizer.pull_parameters()
        return n_steps, optimizer.n_rounds, weights(model)

    results = on_workers(3, body, mode=ps.FirstOf(2))
    if end == "n_rounds":
        assert [n for _, n, _ in results] == [n_rounds] * 3
        assert results[2][0] < n_rounds  # it was late, and makes fewer steps
    assert_close([each for *_, each in results], results[0][2], 0)


@pytest.mark.parametrize("mode", ["async", ps.SSP(1)])
def test_a_mode_without_rounds_counts_none(mode):
    def body(rank, model, optimizer):
        with pytest.raises(rc.RingcommError, match=r"has no rounds; ps.step_number\(\)"):
            _ = optimizer.n_rounds

    on_workers(1, body, mode=mode)


def test_every_worker_begins_with_the_chief_s_values():
    replicas = [nn.Linear(5, 3) for _ in range(3)]
    chief = weights(replicas[0])

    def body(rank):
        wrap(replicas[rank])
        return weights(replicas[rank])

    assert_close(run_workers(3, body), chief, 0)


# --- schedules ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", ["sync", "async", ps.SSP(1), ps.FirstOf(1)], ids=str)
def test_a_schedule_reaches_the_servers_in_the_very_step(mode):
    def body(rank, model, optimizer):
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: [1, 0, 10][k % 3])
        moves = []
        for _ in range(3):
            before = model[0].bias.detach().clone()
            optimizer.zero_grad()
            model[0].bias.sum().backward()
            optimizer.step()
            schedule.step()
            moves.append(float((before - model[0].bias.detach()).max()))
        return moves

    (moves,) = on_workers(1, body, make=lambda p: torch.optim.SGD(p, lr=0.5), mode=mode)
    assert moves == pytest.approx([0.5, 0, 5])


def test_a_scheduler_made_before_the_wrapping_sees_steps():
    def body(rank):
        model = network()
        plain = sgd(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(plain, 1, gamma=0.5)
        optimizer = ps.DistributedOptimizer(plain, model.named_parameters())
        backward(model)
        optimizer.step()
        schedule.step()
        assert isinstance(optimizer, torch.optim.SGD)
        return optimizer.param_groups[0]["lr"]

    assert run_workers(1, body) == [0.025]


def test_step_hooks_run_once_per_step():
    calls = []

    def body(rank, model, optimizer):
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        backward(model)
        optimizer.step()

    for apply in ("server", "worker"):
        on_workers(1, body, apply=apply)
    assert calls == ["before", "after"] * 2


# --- state ----------------------------------------------------------------------------------------
MAKERS = {
    "SGD": sgd,
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
}


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("name", MAKERS)
def test_the_state_is_plain_torch_s_both_ways(name, steps):
    make, size = MAKERS[name], 2
    batches = data(steps + 5, size)
    plain_model, *replicas = copies(network(), 1 + size)
    plain = make(plain_model.parameters())
    fit(plain_model, plain, batches[:steps])
    saved = copy.deepcopy((plain_model.state_dict(), plain.state_dict()))
    fit(plain_model, plain, batches[steps:])

    def body(rank):
        optimizer = wrap(replicas[rank], make)
        fit(replicas[rank], optimizer, share(batches, rank, size)[:2])  # to be forgotten
        replicas[rank].load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        again = optimizer.state_dict()
        fit(replicas[rank], optimizer, share(batches, rank, size)[steps:])
        return weights(replicas[rank]), again, optimizer.state_dict()

    results = run_workers(size, body, 2)
    assert_close([w for w, _, _ in results], weights(plain_model), 1e-9)
    for _, again, last in results:
        assert_same_state(again, saved[1], 0)
        assert_same_state(last, plain.state_dict(), 1e-9)


def assert_same_state(got, expected, tolerance):
    assert got["param_groups"] == expected["param_groups"]
    entries = {k: v for k, v in expected["state"].items() if v}
    assert got["state"].keys() == entries.keys()
    for index, entry in entries.items():
        known = {key: value for key, value in entry.items() if value is not None}
        assert got["state"][index].keys() == known.keys()
        for key, value in known.items():
            mine = got["state"][index][key]
            assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
            torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance)


def test_an_optimizer_that_has_trained_goes_on_with_its_state():
    batches = data(10, 1)
    one, two = copies(network(), 2)
    fit(one, adam(one.parameters()), batches)

    def body(rank):
        plain = adam(two.parameters())
        fit(two, plain, batches[:5])
        fit(two, ps.DistributedOptimizer(plain, two.named_parameters()), batches[5:])

    run_workers(1, body)
    assert_close([weights(two)], weights(one), 1e-10)


def test_a_group_that_is_added_is_trained():
    batches = data(10, 2)
    alone, *replicas = copies(network(), 3)

    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:5])
        optimizer.add_param_group({"params": list(model[3].parameters()), "lr": 0.01})
        fit(model, optimizer, batches[5:])

    def make(model):
        return torch.optim.AdamW([p for layer in model[:3] for p in layer.parameters()], lr=1e-3)

    train(alone, make(alone), batches)

    def body(rank):
        model = replicas[rank]
        train(model, ps.DistributedOptimizer(make(model)), share(batches, rank, 2))
        return weights(model)

    assert_close(run_workers(2, body), weights(alone), 1e-10)


def test_a_parameter_that_is_unfrozen_is_trained():
    batches = data(10, 2)
    alone, *replicas = copies(network(), 3)

    def train(model, optimizer, batches):
        fit(model, optimizer, batches[:5])
        model[0].requires_grad_()
        fit(model, optimizer, batches[5:])

    for model in (alone, *replicas):
        model[0].requires_grad_(False)
    train(alone, adam(alone.parameters()), batches)

    def body(rank):
        train(replicas[rank], wrap(replicas[rank], adam), share(batches, rank, 2))
        return weights(replicas[rank])

    assert_close(run_workers(2, body), weights(alone), 1e-10)


# --- refusals -------------------------------------------------------------------------------------
@pytest.mark.parametrize("apply", ["server", "worker"])
def test_a_gradient_that_changes_after_its_push_is_refused(apply):
    def body(rank, model, optimizer):
        backward(model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(rc.RingcommError, match=r"overlap=False, to clip them max_grad_norm="):
            optimizer.step()

    on_workers(1, body, apply=apply)


def test_a_learning_rate_that_changes_after_the_push_is_refused():
    def body(rank, model, optimizer):
        backward(model)
        optimizer.param_groups[0]["lr"] = 7.0
        with pytest.raises(rc.RingcommError, match=r"lr=7.0.* after backward\(\), .*lr=0.05"):
            optimizer.step()

    on_workers(1, body)


def test_values_that_change_by_hand_are_refused_until_they_are_pushed():
    def body(rank, model, optimizer):
        if rank == 0:
            nn.init.ones_(model[0].weight)
            with pytest.raises(rc.RingcommError, match=r"0.weight was changed by hand.*push_param"):
                backward(model)
            optimizer.zero_grad()
        optimizer.push_parameters()
        assert (model[0].weight == 1).all()
        backward(model)
        optimizer.step()

    on_workers(2, body)


def test_a_second_backward_in_a_step_is_refused():
    def body(rank, model, optimizer):
        backward(model)
        with pytest.raises(rc.RingcommError, match="backward_passes_per_step="):
            backward(model)

    on_workers(1, body)


def test_zero_grad_between_backward_and_step_is_refused():
    def body(rank, model, optimizer):
        backward(model)
        with pytest.raises(rc.RingcommError, match="cannot be taken back"):
            optimizer.zero_grad()

    on_workers(1, body)


def test_a_backward_that_failed_before_any_push_can_be_repeated():
    def body(rank, model, optimizer):
        x = torch.ones(4, 5, dtype=torch.float64)
        hidden = model[:2](x)
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[2:](hidden).square().mean().backward()
        with pytest.raises(rc.RingcommError, match="zero_grad"):
            optimizer.step()
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        assert optimizer.was_applied

    on_workers(1, body, max_grad_norm=10.0)


def test_workers_that_wrap_different_models_are_told():
    def body(rank):
        model = nn.Linear(5, 3 + rank)
        with pytest.raises(rc.MismatchError, match=r"rank 0 has weight .*\(3, 5\).* rank 1"):
            wrap(model)

    run_workers(2, body)


def test_set_samples_on_one_worker_alone_is_an_error_on_all():
    def body(rank, model, optimizer):
        if rank:
            optimizer.set_samples(3)
        backward(model)
        with pytest.raises(rc.MismatchError, match=r"rank 0 has set_samples\(\) called=False"):
            optimizer.step()

    on_workers(2, body)


def test_a_scaler_that_is_passed_must_make_the_step():
    scaler = torch.amp.GradScaler("cpu")

    def body(rank, model, optimizer):
        scaler.scale(model(torch.ones(1, 5, dtype=torch.float64)).sum()).backward()
        with pytest.raises(rc.RingcommError, match=r"scaler.step\(optimizer\)"):
            optimizer.step()

    on_workers(1, body, scaler=scaler)


def test_momentum_that_begins_later_is_refused():
    def body(rank, model, optimizer):
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(ValueError, match="needs another state on the servers"):
            backward(model)

    on_workers(1, body, make=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "asnyc"}, "mode is 'asnyc'"),
        ({"apply": "servers"}, "apply is 'servers'"),
        ({"hybrid": "rings"}, "hybrid is 'rings'"),
        ({"hybrid": "ring"}, "nothing is left"),
        ({"compression": "int4"}, r"compression is 'int4'; it must be None, 'fp16', 'bf16'"),
        ({"max_grad_norm": 0}, "max_grad_norm is 0"),
        ({"backward_passes_per_step": 0}, "a whole number from 1 on"),
        ({"apply": "worker", "mode": "async"}, "each push is an update that the servers make"),
        ({"make": torch.optim.LBFGS, "apply": "server"}, "servers cannot be LBFGS"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        on_workers(1, lambda *_: None, **options)


def test_parameters_that_servers_cannot_keep_are_refused():
    with pytest.raises(TypeError, match=r"0.weight is on meta; parameters must be in host"):
        on_workers(1, lambda *_: None, model=network(torch.float32).to("meta"))


def test_it_is_wrapped_once_and_not_copied():
    def body(rank, model, optimizer):
        with pytest.raises(ValueError, match="wrap it once"):
            ps.DistributedOptimizer(optimizer)
        with pytest.raises(TypeError, match=r"state_dict\(\), which is plain torch"):
            copy.deepcopy(optimizer)

    on_workers(1, body)


def test_hybrid_leaves_dense_parameters_to_the_ring():
    batches = data(5, 2)
    alone, *replicas = copies(network(), 3)
    fit(alone, sgd(alone.parameters()), batches)

    def body(rank):
        session()
        worker_counts.enrol_embedding()
        fit(replicas[rank], wrap(replicas[rank], hybrid="ring"), share(batches, rank, 2))
        assert session().clock == len(batches)
        return weights(replicas[rank])

    assert_close(run_workers(2, body), weights(alone), 1e-12)


def test_embeddings_beside_the_ring_are_bounded_by_its_steps():
    is_over = threading.Event()

    def body(rank):
        rows = ps.Embedding(10, 2, name="rows", mode=ps.SSP(1))
        layer = nn.Linear(2, 1)
        optimizer = wrap(layer, lambda p: torch.optim.SGD(p, lr=0.1), hybrid="ring")
        if rank == 1:
            layer(rows(torch.arange(3))).sum().backward()
            optimizer.step()
            assert is_over.wait(60)  # its second step does not come
            return None
        try:
            layer(rows(torch.arange(3))).sum().backward()
            optimizer.step()
            assert ps.complete_step() == 2
            assert ps.complete_step() == 3
            with deadline(0.5), pytest.raises(rc.CommTimeoutError, match="waits for worker 1"):
                rows(torch.arange(3))
        finally:
            is_over.set()
        return None

    run_workers(2, body)


def test_an_evaluator_has_the_parameters_of_a_snapshot(monkeypatch):
    monkeypatch.setattr(evaluation, "_evaluation", None)
    on_evaluator, seen = [], []

    @ps.evaluator(every=4)
    def evaluate(step):
        if not on_evaluator:
            model = network()
            on_evaluator.append((model, wrap(model, adam)))
        model, optimizer = on_evaluator[0]
        optimizer.pull_parameters()
        seen.append(weights(model))
        ps.report(step, {})

    def body(rank):
        model = network()
        optimizer = wrap(model, adam)
        for step in range(1, 9):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
            if step % 4 == 0 and ps.is_chief():
                ps.reports(until=step)
            rc.barrier()
        return weights(model)

    last, *_ = run_workers(2, body, 2, evaluators=1)
    are_equal = [all(map(torch.equal, each, last)) for each in seen]
    assert are_equal == [False, True]


def test_two_optimizers_share_the_servers():
    batches = data(6, 2)
    makers = [sgd, adam]
    alone, *replicas = copies(nn.ModuleList([network(), network()]), 3)

    def train(pair, optimizers, batches):
        for x, y in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(mse_loss(model(x), y) for model in pair).backward()
            for optimizer in reversed(optimizers):
                optimizer.step()

    train(alone, [make(m.parameters()) for make, m in zip(makers, alone, strict=True)], batches)

    def body(rank):
        wrapped = [wrap(m, make) for make, m in zip(makers, replicas[rank], strict=True)]
        train(replicas[rank], wrapped, share(batches, rank, 2))
        return weights(replicas[rank]), session().clock

    got = run_workers(2, body, 2)
    assert_close([w for w, _ in got], weights(alone), 1e-10)
    assert [clock for _, clock in got] == [len(batches)] * 2  # not twice as many


@pytest.mark.at_length
def test_large_gradients_are_kept_until_the_next_and_small_ones_are_not():
    """Freed at once, their pages would go back to the system: 25,000 faults per step of 80 MB."""
    model = nn.Sequential(nn.Linear(5, 40_000), nn.Linear(40_000, 1)).double()

    def body(rank, model, optimizer):
        backward(model)
        gradients = {p: weakref.ref(p.grad) for p in model.parameters()}
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        return {p.nbytes: gradient() is not None for p, gradient in gradients.items()}

    (kept,) = on_workers(1, body, model=model)
    assert kept == {1_600_000: True, 320_000: True, 8: False}


def test_tensors_that_numpy_cannot_read_are_named_with_the_way():
    bf16 = torch.ones(4, dtype=torch.bfloat16)

    def body(rank):
        w, rows = core_ps.table("w", 4), core_ps.hashtable("rows", 4)
        for call, who in (
            (lambda: w.push(bf16), r"push\[w\]: numpy cannot read x, a Tensor"),
            (lambda: w.push(torch.ones(4, requires_grad=True)), r"push\[w\]: .*detach"),
            (lambda: rows.push([1], bf16[None]), r"push\[rows\]: numpy cannot read rows"),
            (lambda: core_ps.table("v", 4, init=bf16), r"table\[v\]: numpy cannot read init"),
            (lambda: core_ps.table("v", 4, torch.bfloat16), r"\[v\]: dtype is torch.bfloat16"),
        ):
            with pytest.raises(TypeError, match=who):
                call()

    run_workers(1, body)


def test_sparse_adam_is_refused_with_the_way():
    def body(rank):
        model = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters())
        with pytest.raises(ValueError, match=r"SparseAdam.*ps.Embedding"):
            ps.DistributedOptimizer(optimizer, model.named_parameters())

    run_workers(1, body)


def test_the_tables_of_a_model_that_lives_stay():
    def body(rank):
        model = nn.Linear(3, 2)
        wrap(model)
        gc.collect()
        other = nn.Linear(3, 1)
        optimizer = wrap(other)
        require_names("bias+1 (optimizer 1)", "bias+1 (optimizer 2)")
        assert optimizer is not None

    run_workers(2, body)


def test_the_tables_of_an_optimizer_that_is_gone_are_closed_when_another_is_wrapped():
    def body(rank):
        for _ in range(3):
            model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
            optimizer = wrap(model, mode="sync")
            model(torch.randn(4, 3)).sum().backward()
            optimizer.step()
            gone = weakref.ref(optimizer)
            del model, optimizer
            gc.collect()
            assert gone() is None
            rc.barrier()
        kinds = ("1.bias+3", "buffers in float32", "buffers in float64")
        last = [f"{kind} (optimizer 3)" for kind in kinds]
        require_names(*last)
        core_ps.table("w", 3)
        rc.barrier()
        require_names(*last, "w")  # a checkpoint has them, though the function that trained is over

    run_workers(2, body)
