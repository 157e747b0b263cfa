"""Rows of embeddings are clipped, unscaled, skipped and weighed with the gradients beside them."""

import time
from itertools import combinations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import at_length
from ps_optimizer_wrap import wrap
from ps_ranks_as_threads import run_workers
from torch import nn

import ringcomm as rc
from ringcomm.ps.client.client import Client
from ringcomm.ps.client.rows.row_calls import RowCalls
from ringcomm.ps.job import session
from ringcomm.torch import ps
from ringcomm.torch.ps.embeddings import Embedding
from ringcomm.torch.ps.row_gradients import TableGradient

ROWS, DIM, N_STEPS, LR = 31, 5, 6, 0.5
MAX_NORM = 0.6  # which clips some steps and others not
SAMPLES = (3.0, 1.0)
MODES = {"sync": "sync", "async": "async", "ssp": ps.SSP(1), "first of all": ps.FirstOf(2)}


class Model(nn.Module):
    """Rows, in two passes of a step, and parameters beside them."""

    def __init__(self, emb):
        super().__init__()
        self.emb = emb
        self.head = nn.Linear(DIM, 3)
        with torch.no_grad():
            for k, p in enumerate(self.head.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(k)))

    def loss(self, rank, step, spoil=None):
        """Return this worker's; `spoil` is whose gradients become inf, of rows or parameters."""
        g = torch.Generator().manual_seed(step * 17 + rank)
        ids = torch.randint(0, ROWS, (7 - 3 * rank,), generator=g)
        rows, weight = self.emb(ids), self.head.weight * 1.0
        spoiled = {"rows": rows, "parameters": weight}.get(spoil)
        if spoiled is not None:
            spoiled.register_hook(lambda grad: grad * np.inf)
        out = F.linear(rows, weight, self.head.bias)
        return (out.sin() * out).mean() * (1 + step % 3) / 4 + self.emb(ids[:2]).square().mean()


def start():
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(9))


def spoil_of(rank, step):
    """The last worker's rows in one step, and its parameters in another."""
    return {(0, 1): "rows", (0, 3): "parameters"}.get((rank, step))


def plain(n_workers, *, clips=True, scales=False, weighs=False, n_steps=N_STEPS):
    """Return what one process makes of all batches."""
    emb = nn.Embedding(ROWS, DIM)
    emb.load_state_dict({"weight": start()})
    model = Model(emb)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scales)
    weights = SAMPLES[:n_workers] if weighs else [1.0] * n_workers
    for step in range(n_steps):
        optimizer.zero_grad()
        losses = [
            model.loss(rank, step, spoil_of(rank, step) if scales else None) * weights[rank]
            for rank in range(n_workers)
        ]
        scaler.scale(sum(losses) / sum(weights)).backward()
        scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
    return emb.weight.detach(), model.head.weight.detach(), scaler.get_scale()


def served(rank, mode, *, clips, scales, weighs, emb_mode=None, **options):
    """Return what a worker has in the end."""
    emb = Embedding(ROWS, DIM, name="e", optimizer=ps.optim.SGD(LR), mode=emb_mode or mode)
    if ps.is_chief():
        emb.load(start())
    rc.barrier()
    model = Model(emb)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2, enabled=scales)
    optimizer = wrap(
        model, lambda p: torch.optim.SGD(p, LR), mode=mode, scaler=scaler if scales else None,
        max_grad_norm=MAX_NORM if clips else None, **options,
    )  # fmt: skip
    for step in range(N_STEPS):
        if weighs:
            optimizer.set_samples(SAMPLES[rank])
        optimizer.zero_grad()
        scaler.scale(model.loss(rank, step, spoil_of(rank, step) if scales else None)).backward()
        scaler.step(optimizer)
        scaler.update()
    weight = emb(torch.arange(ROWS)).detach()
    rc.barrier()
    return weight, model.head.weight.detach(), scaler.get_scale()


def require_alike(results, expected):
    for rows, head, scale in results:
        torch.testing.assert_close(rows, expected[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(head, expected[1], rtol=1e-4, atol=1e-5)
        assert scale == expected[2]


TERMS = ("clips", "scales", "weighs")
CASES = [each for n in range(4) for each in combinations(TERMS, n)]
SOME = [CASES[1], CASES[2], CASES[3], CASES[-1]]


@pytest.mark.parametrize("terms", at_length(CASES, SOME), ids="+".join)
@pytest.mark.parametrize("mode", MODES)
def test_rows_and_parameters_train_as_in_one_process(mode, terms):
    n = 2 if MODES[mode] in ("sync", ps.FirstOf(2)) else 1  # else one process has no such order
    what = {each: each in terms for each in TERMS}
    results = run_workers(n, lambda rank: served(rank, MODES[mode], **what), 2)
    require_alike(results, plain(n, **what))


@pytest.mark.parametrize("mode", ["sync", "first of all"])
def test_so_they_do_where_workers_make_the_update(mode):
    what = {"clips": True, "scales": True, "weighs": True}
    results = run_workers(2, lambda r: served(r, MODES[mode], apply="worker", **what), 2)
    require_alike(results, plain(2, **what))


@pytest.mark.parametrize("apply", ["server", "worker"])
def test_an_inf_in_rows_without_rounds_skips_the_step_of_all(apply):
    """Rows are pushed as they come by default, parameters by rounds; the scale is that of all."""

    def body(rank):
        model = Model(Embedding(ROWS, DIM, name="e", optimizer=ps.optim.SGD(LR)))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        optimizer = wrap(model, scaler=scaler, apply=apply)
        before = [p.detach().clone() for p in model.head.parameters()]
        optimizer.zero_grad()
        scaler.scale(model.loss(rank, 0, "rows" if rank else None)).backward()
        scaler.step(optimizer)
        scaler.update()
        for p, old in zip(model.head.parameters(), before, strict=True):
            assert torch.equal(p.detach(), old)
        rc.barrier()
        return optimizer.was_applied, len(model.emb.table), scaler.get_scale()

    assert run_workers(2, body, 2) == [(False, 0, 512.0)] * 2


def test_rows_of_a_worker_without_samples_count_for_nothing():
    def body(rank):
        emb = Embedding(
            None, 1, name="e", mode="sync", optimizer=ps.optim.SGD(1.0),
            init=ps.initializers.zeros(),
        )  # fmt: skip
        p = nn.Parameter(torch.zeros(1))
        optimizer = ps_optimizer([p])
        optimizer.set_samples(rank)
        (emb(torch.tensor([4])).sum() * (1.0 if rank else np.nan)).backward()
        optimizer.step()
        return emb(torch.tensor([4])).item()

    assert run_workers(2, body) == [-1.0, -1.0]


def ps_optimizer(parameters, **options):
    return wrap(nn.ParameterList(parameters), lambda p: torch.optim.SGD(p, 1.0), **options)


@pytest.mark.parametrize(
    ("mode", "emb_mode", "clips"),
    [("sync", "async", True), ("async", "sync", True), ("async", "sync", False)],
)
def test_modes_without_a_norm_or_a_scale_in_common_are_refused(mode, emb_mode, clips):
    def body(_):
        scaler = torch.amp.GradScaler("cpu", enabled=not clips)
        emb = Embedding(None, 1, name="e", mode=emb_mode)
        p = nn.Parameter(torch.zeros(1))
        norm = 1.0 if clips else None
        optimizer = ps_optimizer([p], mode=mode, scaler=scaler, max_grad_norm=norm)
        scaler.scale(emb(torch.tensor([4])).sum() + p.sum()).backward()
        for _ in range(2):  # again, when step() is called again
            with pytest.raises(ValueError, match=rf"mode is '{mode}', and that of embedding\[e"):
                scaler.step(optimizer)

    run_workers(1, body)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_step_that_found_no_credit_half_way_is_called_again_and_made_once(mode, monkeypatch):
    """Whichever of its requests it is: all before it count, and are not sent again."""
    n_calls = 40

    def body(_):
        emb = Embedding(ROWS, DIM, name="e", optimizer=ps.optim.SGD(LR), mode=mode)
        emb.load(start())
        model, left = Model(emb), [-1]
        optimizer = ps.DistributedOptimizer(
            torch.optim.SGD([{"params": [p]} for p in model.head.parameters()], LR),
            mode=mode, max_grad_norm=MAX_NORM,
        )  # fmt: skip
        for name, kind in (("send", Client), ("push", Client), ("begin", RowCalls)):
            monkeypatch.setattr(kind, name, counted(getattr(kind, name), left))
        for step in range(n_calls):
            optimizer.zero_grad()
            model.loss(0, step).backward()
            left[0] = step
            try:
                optimizer.step()
            except rc.CommTimeoutError:
                time.sleep(0.01)  # values that were asked for arrive meanwhile
                optimizer.step()
            was_last, left[0] = left[0] > 0, -1
        assert was_last  # no step has so many requests
        assert session().clock == n_calls
        return emb(torch.arange(ROWS)).detach(), model.head.weight.detach(), 1.0

    require_alike(run_workers(1, body, 2), plain(1, n_steps=n_calls))


def counted(method, left):
    """Return a method that finds no credit when it is called for the left[0]-th time."""

    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise rc.CommTimeoutError("no credit", missing=[1])
        return method(*args, **kwargs)

    return call


def test_what_zero_grad_forgets_is_no_part_of_the_step():
    def body(_):
        emb = Embedding(None, 1, name="e", optimizer=ps.optim.SGD(1.0), mode="sync",
                        init=ps.initializers.zeros())  # fmt: skip
        p = nn.Parameter(torch.zeros(1))
        optimizer = ps_optimizer([p], max_grad_norm=5.0)
        for ids in ([4], [4, 7]):
            optimizer.zero_grad()
            (emb(torch.tensor(ids)).sum() + p.sum()).backward()
        optimizer.step()
        assert emb.pushed.wait().applied
        return emb(torch.tensor([4, 7])).flatten().tolist()

    assert run_workers(1, body) == [[-1.0, -1.0]]


def test_a_row_that_is_not_finite_is_refused_where_no_scaler_looks_for_it():
    def body(_):
        emb = Embedding(None, 1, name="e", mode="sync")
        p = nn.Parameter(torch.zeros(1))
        optimizer = ps_optimizer([p], max_grad_norm=5.0)
        (emb(torch.tensor([4])).sum() * np.inf + p.sum()).backward()
        with pytest.raises(ValueError, match=r"push\[e\]: NaN or inf among the 1 rows"):
            optimizer.step()
        return len(emb.table)

    assert run_workers(1, body) == [0]


def test_the_ring_clips_and_unscales_no_rows():
    def body(_):
        Embedding(None, 1, name="e")
        p = nn.Parameter(torch.zeros(1))
        for what in ({"max_grad_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}):
            with pytest.raises(ValueError, match="hybrid is 'ring', and max_grad_norm= or scaler="):
                ps_optimizer([p], hybrid="ring", **what)

    run_workers(1, body)


def test_rows_of_several_passes_are_summed_by_key():
    keys = [np.array([3, 8, 2**63 - 1]), np.array([0, 8]), np.array([], np.int64)]
    rows = [np.full((len(each), 2), k + 1, np.float32) for k, each in enumerate(keys)]
    found, total = TableGradient(None, None, list(zip(keys, rows, strict=True))).whole()
    assert found.tolist() == [0, 3, 8, 2**63 - 1]
    assert total[:, 1].tolist() == [2, 1, 3, 1]
