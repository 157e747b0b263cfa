"""A collection of embeddings trains as its modules do alone, with and without rows ahead."""

import numpy as np
import pytest
import torch
from ps_ranks_as_threads import run_workers
from torch.utils.data import DataLoader
from training_models import traced_of_ringcomm

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.client.rows import rows_ahead
from ringcomm.ps.client.rows.rows_ahead import rows_of
from ringcomm.ps.session import session
from ringcomm.torch.ps import Embedding, EmbeddingBag, EmbeddingCollection, prefetching

ROWS, DIM, STEPS = 40, 6, 8


def modules(mode, **options):
    options = {"optimizer": ps.optim.SGD(0.1), "mode": mode} | options
    return {
        "user": Embedding(ROWS, DIM, name="user", **options),
        "item": EmbeddingBag(ROWS, DIM, name="item", padding_idx=3, bag="sum", **options),
        "tag": EmbeddingBag(None, 2 * DIM, name="tag", **options),
    }


def batches(rank, n=STEPS):
    g = torch.Generator().manual_seed(rank)
    return [
        {
            "user": torch.randint(0, ROWS, (5,), generator=g),
            "item": (
                torch.randint(0, ROWS, (9,), generator=g),
                torch.tensor([0, 2, 2, 5]),
                torch.rand(9, generator=g),
            ),
            "tag": torch.randint(0, 10**9, (4, 3), generator=g),
        }
        for _ in range(n)
    ]


def loss_of(outputs):
    return sum((each.sin() * each).mean() for each in outputs)


def alone(parts, batch):
    """The forward passes of the modules, one after the other."""
    arguments = [each if isinstance(each, tuple) else (each,) for each in batch.values()]
    return [module(*each) for module, each in zip(parts.values(), arguments, strict=True)]


def train(mode, step, n_workers=2, **options):
    """Return the losses of each worker, and the rows in the end."""

    def body(rank):
        parts = modules(mode, **options)
        losses = [loss.item() for loss in step(parts, batches(rank))]
        rc.barrier()
        rows = [parts[name].weight_now().tolist() for name in ("user", "item")]
        return losses, rows

    return run_workers(n_workers, body, 2)


def by_modules(parts, data):
    for batch in data:
        loss = loss_of(alone(parts, batch))
        loss.backward()
        yield loss


def by_collection(parts, data):
    tables = EmbeddingCollection(parts)
    for batch in data:
        loss = loss_of(tables(batch).values())
        loss.backward()
        yield loss


def by_list(parts, data):
    tables = EmbeddingCollection(parts.values())
    for batch in data:
        loss = loss_of(tables(list(batch.values())))
        loss.backward()
        yield loss


def ahead(parts, data):
    tables = EmbeddingCollection(parts)
    for batch in prefetching(data, tables, ids=lambda batch: batch):
        loss = loss_of(tables(batch).values())
        loss.backward()
        yield loss


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("step", [by_collection, by_list, ahead])
def test_sync_training_has_the_bits_of_single_modules(step, compression):
    options = {"pull_compression": compression}
    assert train("sync", step, **options) == train("sync", by_modules, **options)


@pytest.mark.parametrize("mode", ["async", ps.SSP(2)], ids=str)
@pytest.mark.parametrize("step", [by_collection, ahead])
def test_a_worker_alone_reads_its_own_writes(step, mode):
    assert train(mode, step, n_workers=1) == train(mode, by_modules, n_workers=1)


def test_rows_of_the_next_batch_are_used_in_a_round():
    def body(rank):
        tables = EmbeddingCollection(modules("sync"))
        first, second = batches(rank, 2)
        outputs = tables(first)
        tables.prefetch(second)
        loss_of(outputs.values()).backward()
        [aheads] = [dict(each) for each in tables._prefetched._ahead]
        assert all(each.stale() is not None for each in aheads.values())
        tables(second)
        assert not tables._prefetched._ahead
        return all(each.future.done() for each in aheads.values())

    assert run_workers(2, body, 2) == [True] * 2


@pytest.mark.parametrize("mode", ["sync", "async", ps.SSP(1)], ids=str)
def test_only_the_first_batch_and_what_was_pushed_since_is_pulled_again(mode, monkeypatch):
    kept = {}

    def noting(pulls):
        if ps.is_chief():
            stale = [None if rows is None else rows.stale() for *_, rows in pulls]
            kept.setdefault("chief", []).append(
                [None if each is None else float(each.mean()) for each in stale]
            )
        return rows_of(pulls)

    monkeypatch.setattr(rows_ahead, "rows_of", noting)

    def ticking(parts, data):
        for loss in ahead(parts, data):
            yield loss
            session().tick()

    train(mode, ticking)
    first, *others = kept["chief"]
    assert first == [None] * 3
    assert all(each is not None for one in others for each in one)
    users, _, tags = np.mean(others, axis=0)  # of 40 ids, and of a billion
    assert tags == 0
    assert users == 0 if mode == "sync" else 0 < users < 0.5


def test_other_ids_leave_what_is_ahead_and_changed_ids_are_others():
    def body(_):
        tables = EmbeddingCollection(modules("async"))
        first, second = batches(0, 2)
        tables.prefetch(second)
        with torch.no_grad():
            tables(first)
            assert set(tables._prefetched._ahead[0]) == {"user", "item", "tag"}
            second["user"][0] += 1  # in place
            changed = tables(second)
            assert not tables._prefetched._ahead
            expected = tables.embeddings.user(second["user"])
        return torch.equal(changed["user"], expected)

    assert run_workers(1, body, 1) == [True]


def test_modules_may_share_a_table():
    def body(_):
        parts = [Embedding(ROWS, DIM, name="same") for _ in range(2)]
        tables = EmbeddingCollection(parts)
        ids = [torch.tensor([1, 2, 2]), torch.tensor([2, 3])]
        tables.prefetch(ids)
        a, b = tables(ids)
        assert torch.equal(a[1], b[0])
        (a.sum() + b.sum()).backward()
        expected = a[1] - 3 * 0.01  # three times in all
        assert torch.allclose(parts[0](torch.tensor([2]))[0], expected)
        return True

    assert run_workers(1, body, 2) == [True]


def test_a_loader_looks_one_batch_ahead_with_the_weight_of_the_present_one():
    class Optimizer:
        samples = None

        def set_samples(self, n):
            self.samples = n

    def body(_):
        tables = EmbeddingCollection([Embedding(ROWS, DIM, name="e")])
        x, optimizer = torch.arange(20), Optimizer()
        sampler = rc.data.ShardedSampler(20, shuffle=False)
        loader = rc.data.Loader(x, 8, sampler=sampler, optimizer=optimizer)
        wrapped = prefetching(loader, tables, ids=lambda ids: [ids])
        seen = []
        for ids in wrapped:
            batches = [each for each in tables._prefetched._ahead if each]
            following = [each["0"].pull.keys.tolist() for each in batches]
            seen.append((ids.tolist(), optimizer.samples, following))
            [out] = tables([ids])
            assert out.shape == (len(ids), DIM)
        return seen, len(wrapped)

    a, b, c = list(range(8)), list(range(8, 16)), list(range(16, 20))
    [(seen, n)] = run_workers(1, body, 1)
    assert n == 3
    assert seen == [(a, 8, [b]), (b, 8, [b, c]), (c, 4, [c])]


def test_a_dataloader_of_torch_yields_its_batches():
    def body(_):
        tables = EmbeddingCollection([Embedding(ROWS, DIM, name="e")])
        loader = DataLoader(torch.arange(10), batch_size=4)
        wrapped = prefetching(loader, tables, ids=lambda ids: [ids])
        return [[each.tolist() for each in wrapped] for _ in range(2)], len(wrapped)

    epoch = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert run_workers(1, body, 1) == [([epoch, epoch], 3)]


def test_gradients_that_wait_for_a_step_make_rows_stale_once_they_are_pushed():
    def body(rank):
        parts = modules("sync")
        tables = EmbeddingCollection(parts)
        dense = torch.nn.Linear(1, 1)
        optimizer = rc.torch.ps.DistributedOptimizer(
            torch.optim.SGD(dense.parameters(), 0.1), dense.named_parameters(), mode="sync",
            max_grad_norm=1.0,
        )  # fmt: skip
        for batch in prefetching(batches(rank), tables, ids=lambda batch: batch):
            out = tables(batch)
            expected = alone(parts, batch)
            assert all(map(torch.equal, out.values(), expected))
            (loss_of(out.values()) + dense(torch.ones(1, 1)).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return session().client.n_resent

    assert run_workers(2, body, 2) == [0, 0]


def test_what_a_collection_cannot_take_is_refused():
    def body(_):
        tables = EmbeddingCollection({"items": Embedding(ROWS, DIM, name="a")})
        with pytest.raises(TypeError, match=r"Linear\(.*is no embedding"):
            EmbeddingCollection([torch.nn.Linear(1, 1)])
        with pytest.raises(ValueError, match=r"got inputs \['b'\]; pass ids for \['items'\]"):
            tables({"b": torch.tensor([1])})
        with pytest.raises(IndexError, match="id 40 is not in"):
            tables.prefetch({"items": torch.tensor([40])})
        with pytest.raises(TypeError, match="collection must have prefetch"):
            prefetching([], "tables", ids=len)
        with pytest.raises(TypeError, match="ids must be a function"):
            prefetching([], tables, ids=None)
        return True

    assert run_workers(1, body, 1) == [True]


@pytest.mark.parametrize("has_grad", [False, True])
def test_an_evaluation_with_rows_ahead_asks_for_no_more_and_more(has_grad):
    def body(_):
        tables = EmbeddingCollection(modules("sync"))
        given = batches(0, 30)
        expected = [tables(each)["user"].detach() for each in given]
        with torch.set_grad_enabled(has_grad):
            for batch, wanted in zip(
                prefetching(given, tables, ids=lambda batch: batch), expected, strict=True
            ):
                assert torch.equal(tables(batch)["user"], wanted)
        return len(session().client.requests)

    assert run_workers(1, body, 1)[0] <= (3 if has_grad else 0)  # one of each table


def test_a_forward_pass_that_failed_leaves_nothing_for_the_next():
    def body(_):
        tables = EmbeddingCollection({"user": Embedding(ROWS, DIM, name="user")})
        ids, other = torch.tensor([1, 2]), torch.tensor([5, 6])
        with pytest.raises(TypeError):
            tables({"user": (ids, "too many")})
        ids.copy_(other)
        return torch.equal(tables.embeddings.user(ids), tables.embeddings.user(other.clone()))

    assert run_workers(1, body, 1) == [True]


def test_bad_names_and_inputs_of_a_collection_are_named():
    def body(_):
        one = Embedding(ROWS, DIM, name="user")
        with pytest.raises(TypeError, match="the name 0 is no string"):
            EmbeddingCollection({0: one, "0": one})
        with pytest.raises(ValueError, match=r"the name 'user\.id': "):
            EmbeddingCollection({"user.id": one})
        tables = EmbeddingCollection({"user": one})
        for wrong in (3, None, torch.tensor([1])):
            with pytest.raises(TypeError, match=r"inputs are .*; pass ids for \['user'\]"):
                tables(wrong)
        for wrong in ([1, 2], (), "ids"):
            with pytest.raises(TypeError, match=r"user got .*; pass a tensor of ids"):
                tables({"user": wrong})
        return True

    assert run_workers(1, body, 1) == [True]


def test_torch_would_trace_nothing_that_asks_or_tells_servers():
    """But Embedding.forward(), and the hook by which it pushes."""

    def body(_):
        emb = Embedding(ROWS, DIM, name="user", optimizer=ps.optim.SGD(0.1))
        both, ids = EmbeddingCollection([emb]), torch.tensor([3, 1, 3])
        alone = traced_of_ringcomm(lambda: loss_of([emb(ids)]).backward())
        assert alone == ["Embedding.forward", "_Rows._pulled.<locals>.<lambda>"]
        assert traced_of_ringcomm(lambda: loss_of(both([ids])).backward()) == alone[1:]
        # Nor are these traced within who calls them.
        assert emb._pulled._torchdynamo_disable
        assert both.forward._torchdynamo_disable

    run_workers(1, body)


@pytest.mark.at_length  # torch takes 5 s of a core to load what compiles
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:The .grad attribute"
)  # torch's own, as it compiles
@pytest.mark.parametrize("is_collected", [False, True])
def test_a_compiled_model_trains_its_rows(is_collected):
    start = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, ROWS, (3, 4), generator=torch.Generator().manual_seed(1))

    def train(call, step=lambda: None):
        for each in ids:
            loss_of(call(each)).backward()
            step()

    def body(_):
        emb = Embedding(ROWS, DIM, name="user", optimizer=ps.optim.SGD(0.1))
        emb.load(start)
        both = EmbeddingCollection([emb])
        torch._dynamo.reset()
        forward = (lambda x: [2 * y for y in both([x])]) if is_collected else lambda x: [2 * emb(x)]
        train(torch.compile(forward, backend="eager"))
        return emb.weight_now()

    plain = torch.nn.Embedding(ROWS, DIM)
    plain.load_state_dict({"weight": start})
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    train(lambda x: [2 * plain(x)], step)
    torch.testing.assert_close(run_workers(1, body)[0], plain.weight.detach())
