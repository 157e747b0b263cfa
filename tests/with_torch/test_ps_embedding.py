"""Embeddings on servers train as nn.Embedding does in one process."""

import numpy as np
import pytest
import torch
from harness import at_length
from ps_ranks_as_threads import run_workers
from torch import nn

import ringcomm as rc
from ringcomm import ps
from ringcomm.torch.ps.embeddings import Embedding, EmbeddingBag

pytestmark = pytest.mark.usefixtures("wire")

ROWS, DIM = 30, 6
OPTIMIZERS = {
    "sgd": (ps.optim.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "adagrad": (ps.optim.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, 0.1)),
}


def start(seed=0):
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


def batches(n_steps, n_workers, shape):
    g = torch.Generator().manual_seed(5)
    return [torch.randint(0, ROWS, (n_workers, *shape), generator=g) for _ in range(n_steps)]


def head(out):
    """A loss that is not linear in the rows."""
    return (out.sin() * out).mean()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, of sparse=True
@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("n_workers", "n_servers"), at_length([(1, 1), (2, 1), (3, 2)], [(3, 2)]))
def test_sync_training_equals_one_process_on_all_batches(n_workers, n_servers, name, padding_idx):
    updater, make = OPTIMIZERS[name]
    steps = batches(15, n_workers, (4, 5))
    plain = nn.Embedding(ROWS, DIM, sparse=True, padding_idx=padding_idx)
    plain.load_state_dict({"weight": start()})
    if padding_idx is not None:
        with torch.no_grad():
            plain.weight[padding_idx] = 0
    optimizer = make(plain.parameters())
    for ids in steps:
        optimizer.zero_grad()
        head(plain(ids)).backward()
        optimizer.step()

    def body(rank):
        emb = Embedding(
            ROWS, DIM, name="e", optimizer=updater, mode="sync", padding_idx=padding_idx
        )
        if ps.is_chief():
            emb.load(start())
        rc.barrier()
        for ids in steps:
            head(emb(ids[rank])).backward()
        return emb(torch.arange(ROWS)).detach()

    for rows in run_workers(n_workers, body, n_servers):
        torch.testing.assert_close(rows, plain.weight.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("padding_idx", [None, 3])
@pytest.mark.parametrize("bag", ["sum", "mean", "max"])
def test_bags_equal_those_of_torch(bag, padding_idx):
    plain = nn.EmbeddingBag(ROWS, DIM, mode=bag, padding_idx=padding_idx)
    with torch.no_grad():
        plain.weight.copy_(start())
        if padding_idx is not None:
            plain.weight[padding_idx] = 0
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    ids = [torch.randint(0, ROWS, (40,)) for _ in range(8)]
    offsets = torch.tensor([0, 3, 3, 17, 30])
    weights = torch.rand(40) if bag == "sum" else None
    expected = []
    for each in ids:
        optimizer.zero_grad()
        out = plain(each, offsets, weights)
        expected.append(out.detach())
        head(out).backward()
        optimizer.step()

    def body(_):
        emb = EmbeddingBag(
            ROWS, DIM, name="e", bag=bag, optimizer=ps.optim.SGD(0.1), padding_idx=padding_idx
        )
        emb.load(start())
        for each, wanted in zip(ids, expected, strict=True):
            out = emb(each, offsets, weights)
            torch.testing.assert_close(out.detach(), wanted, rtol=1e-5, atol=1e-6)
            head(out).backward()
        return True

    assert run_workers(1, body, 2) == [True]


def test_gradients_of_bag_weights_are_those_of_torch():
    ids, offsets = torch.randint(0, ROWS, (20,)), torch.tensor([0, 7])
    plain = nn.EmbeddingBag(ROWS, DIM, mode="sum")
    with torch.no_grad():
        plain.weight.copy_(start())
    wanted = torch.rand(20, generator=torch.Generator().manual_seed(1)).requires_grad_()
    head(plain(ids, offsets, wanted)).backward()

    def body(_):
        emb = EmbeddingBag(None, DIM, name="e", bag="sum")
        emb.load(start())
        weights = wanted.detach().clone().requires_grad_()
        head(emb(ids, offsets, weights)).backward()
        return weights.grad

    torch.testing.assert_close(run_workers(1, body)[0], wanted.grad)


def test_what_runs_without_gradients_pushes_nothing():
    def body(_):
        emb = Embedding(None, DIM, name="e")
        with torch.no_grad():
            emb(torch.tensor([[2**62, 1]]))
        emb.eval()
        return emb.pushed, len(emb.table)

    assert run_workers(1, body) == [(None, 0)]


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
def test_rows_that_are_frozen_stay_as_they_are_until_they_are_trained_again(kind):
    def body(rank):
        emb = kind(None, 1, name="e", mode="sync", optimizer=ps.optim.SGD(1.0))
        beside = torch.ones(1, requires_grad=True)
        before = emb.table.pull([7]).wait().item()
        values = []
        for is_trained in (False, False, True):
            assert emb.requires_grad_(is_trained) is emb
            (emb(torch.tensor([[7]])) * beside).sum().backward()
            values.append(emb.table.pull([7]).wait().item() - before)
        return values, beside.grad is not None

    assert run_workers(2, body) == [([0.0, 0.0, pytest.approx(-1.0)], True)] * 2


def test_who_asks_for_the_weight_is_told_where_the_rows_are():
    def body(_):
        emb = Embedding(ROWS, DIM, name="e")
        with pytest.raises(AttributeError, match=r"the rows are on the servers\. weight_now\(\)"):
            torch.nn.init.zeros_(emb.weight)
        return hasattr(emb, "weight")

    assert run_workers(1, body) == [False]


def test_a_batch_without_ids_takes_part_in_a_round():
    def body(rank):
        emb = Embedding(
            None, 1, name="e", mode="sync", optimizer=ps.optim.SGD(1.0),
            init=ps.initializers.zeros(),
        )  # fmt: skip
        emb(torch.tensor([7] if rank == 0 else [], dtype=torch.int64)).sum().backward()
        return emb.pushed.wait().applied, emb(torch.tensor([7])).item()

    assert run_workers(2, body) == [(True, -0.5)] * 2


def test_a_learning_rate_reaches_the_servers():
    def body(_):
        emb = Embedding(
            None, 1, name="e", optimizer=ps.optim.SGD(1.0), init=ps.initializers.zeros()
        )
        for lr in (1.0, 0.5, 0.25):
            emb.optimizer = emb.optimizer.with_(lr=lr)
            emb(torch.tensor([7])).sum().backward()
        return emb(torch.tensor([7])).item()

    assert run_workers(1, body) == [-1.75]


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([ROWS]), IndexError, r"id 30 is not in \[0, 30\)"),
        (torch.tensor([-1]), IndexError, "id -1 is not in"),
        (torch.tensor([1.0]), TypeError, "ids are torch.float32"),
        ([1, 2], TypeError, "ids are a list; pass a tensor"),
        (np.array([1]), TypeError, "ids are a ndarray; pass a tensor"),
    ],
)
def test_a_wrong_id_is_one_clear_error(ids, error, message):
    def body(_):
        emb = Embedding(ROWS, DIM, name="e")
        with pytest.raises(error, match=message):
            emb(ids)
        return emb(torch.tensor([], dtype=torch.int64)).shape

    assert run_workers(1, body) == [(0, DIM)]


@pytest.mark.parametrize("padding_idx", [None, (1 << 64) - 5])
def test_ids_may_be_hashes_of_64_bits(padding_idx):
    ids = np.array([[-5, -(1 << 63)], [7, -5]], np.int64)

    def body(_):
        emb = Embedding(
            None, DIM, name="e", init=ps.initializers.zeros(), optimizer=ps.optim.SGD(1.0),
            padding_idx=padding_idx,
        )  # fmt: skip
        with pytest.raises(IndexError, match=r"id -9223372036854775808 .*ids.view\(torch"):
            emb(torch.from_numpy(ids))
        keys = ids.view(np.uint64)
        for _ in range(2):
            emb(torch.from_numpy(keys)).sum().backward()
        return len(emb.table), emb.table.pull(keys).wait()[:, :, 0].tolist()

    is_padded = padding_idx is not None
    of_5 = 0.0 if is_padded else -4.0
    assert run_workers(1, body) == [(3 - is_padded, [[of_5, -2.0], [-2.0, of_5]])]


def test_a_table_says_how_signed_hashes_in_a_tensor_are_passed():
    def body(_):
        table, keys = ps.hashtable("t", DIM), torch.tensor([-5, 7])
        with pytest.raises(ValueError, match=r"key -5 .* as keys.numpy\(\).view\(np.uint64\)"):
            table.pull(keys)
        return table.pull(keys.numpy().view(np.uint64)).wait().shape

    assert run_workers(1, body) == [(2, DIM)]


def test_a_table_that_admits_late_refuses_to_be_loaded():
    def body(_):
        emb = Embedding(ROWS, DIM, name="e", admit=ps.Admit(min_count=2))
        with pytest.raises(ValueError, match="30 of 30 rows were not admitted"):
            emb.load(start())
        return True

    assert run_workers(1, body) == [True]
