"""ps.convert(): embeddings of a model go to the servers, train as before, and come back."""

import copy

import pytest
import torch
from ps_ranks_as_threads import run_workers
from torch import nn

import ringcomm as rc
import ringcomm.torch as hvd
from ringcomm.torch import ps

ROWS, DIM = 50, 4


class Model(nn.Module):
    """Two large embeddings, one of them of bags, a small one, and a head."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, padding_idx=0, dtype=dtype)
        self.towers = nn.ModuleDict({"tags": nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=dtype)})
        self.small = nn.Embedding(5, DIM, dtype=dtype)
        self.head = nn.Linear(DIM, 1, dtype=dtype)

    def forward(self, ids):
        x = self.words(ids).mean(1) + self.towers["tags"](ids) + self.small(ids[:, 0] % 5)
        return self.head(torch.tanh(x))


def made(make=Model, **options):
    torch.random.default_generator.manual_seed(3)
    return make(**options)


def batches(n, workers=1):
    g = torch.Generator().manual_seed(5)
    return torch.randint(0, ROWS, (n, workers, 6, 3), generator=g)


def loss_of(model, ids):
    return (model(ids) - ids.float().mean(1, keepdim=True) / ROWS).square().mean()


def train_alone(model, steps, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for ids in steps:
        optimizer.zero_grad()
        loss_of(model, ids.reshape(-1, 3)).backward()
        optimizer.step()


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("hybrid", [None, "ring"])
@pytest.mark.parametrize(("n_workers", "n_servers"), [(1, 1), (2, 2)])
def test_a_converted_model_trains_as_one_process(n_workers, n_servers, hybrid, dtype):
    plain, steps = made(dtype=dtype), batches(6, n_workers)
    replicas = [copy.deepcopy(plain) for _ in range(n_workers)]
    train_alone(plain, steps)

    def body(rank):
        model = replicas[rank]
        ps.convert(model, min_rows=ROWS, optimizer=ps.optim.SGD(0.1), mode="sync")
        assert isinstance(model.words, ps.Embedding)
        assert isinstance(model.towers["tags"], ps.EmbeddingBag)
        assert type(model.small) is nn.Embedding
        named = model.named_parameters()
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = ps.DistributedOptimizer(sgd, named, hybrid=hybrid)
        for ids in steps:
            optimizer.zero_grad()
            loss_of(model, ids[rank]).backward()
            optimizer.step()
        return model.state_dict()

    for state in run_workers(n_workers, body, n_servers):
        assert list(state) == list(plain.state_dict())
        back = made(dtype=dtype)
        back.load_state_dict(state)  # as any plain checkpoint
        for mine, theirs in zip(back.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("wire")
def test_the_weights_are_those_of_the_chief_and_named_as_the_modules():
    def body(rank):
        model = replicas[rank]
        chief = replicas_before[0]
        ps.convert(model, min_rows=ROWS)
        assert model.words.table.name == "words"
        assert model.towers["tags"].table.name == "towers.tags"
        assert torch.equal(model.words.weight_now(), chief.words.weight)
        ids = batches(1)[0, 0]
        expected = chief.words(ids) + chief.towers["tags"](ids).unsqueeze(1)
        assert torch.equal(model.words(ids) + model.towers["tags"](ids).unsqueeze(1), expected)
        return True

    replicas = [Model() for _ in range(2)]
    replicas_before = copy.deepcopy(replicas)
    assert run_workers(2, body, 2) == [True, True]


def test_a_plain_state_is_loaded_into_a_converted_model():
    model, other = made(), Model()

    def body(rank):
        mine = ps.convert(copies[rank], min_rows=ROWS)
        mine.load_state_dict(other.state_dict())
        rc.barrier()
        return mine.state_dict()

    copies = [copy.deepcopy(model) for _ in range(2)]
    for state in run_workers(2, body):
        for key, value in other.state_dict().items():
            assert torch.equal(state[key], value)


def test_a_state_that_does_not_fit_is_refused():
    def body(_):
        model = ps.convert(made(), min_rows=ROWS)
        state = model.state_dict()
        with pytest.raises(RuntimeError, match=r'Missing key.*"words.weight"'):
            model.load_state_dict({k: v for k, v in state.items() if k != "words.weight"})
        with pytest.raises(RuntimeError, match=r"weight of shape \(51, 4\), and there are 50 rows"):
            model.load_state_dict({**state, "words.weight": torch.ones(ROWS + 1, DIM)})
        with pytest.raises(RuntimeError, match=r'Unexpected key.*"words.bias"'):
            model.load_state_dict({**state, "words.bias": torch.ones(1)})
        return True

    assert run_workers(1, body) == [True]


# --- what is shared -----------------------------------------------------------------------------
class Shared(nn.Module):
    """One module in two places, and one weight in two modules."""

    def __init__(self):
        super().__init__()
        self.source = nn.Embedding(ROWS, DIM)
        self.layers = nn.ModuleList([self.source, nn.Embedding(ROWS, DIM)])
        self.layers[1].weight = self.source.weight
        self.head = nn.Linear(DIM, 1)

    def forward(self, ids):
        return self.head(self.source(ids).sum(1) + self.layers[1](ids).square().mean(1))


def test_what_is_shared_stays_shared():
    plain, steps = made(Shared), batches(5)
    model = copy.deepcopy(plain)
    train_alone(plain, steps)

    def body(_):
        ps.convert(model, min_rows=ROWS, optimizer=ps.optim.SGD(0.1))
        assert model.source is model.layers[0] is model.layers[1]
        head = torch.optim.SGD(model.parameters(), 0.1)
        for ids in steps:
            head.zero_grad()
            loss_of(model, ids[0]).backward()
            head.step()
        return model.state_dict()

    (state,) = run_workers(1, body, 2)
    assert state.keys() == plain.state_dict().keys()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)


def tied(model):
    model.out = nn.Linear(DIM, ROWS, bias=False)
    model.out.weight = model.words.weight


def differing(model):
    model.more = nn.Embedding(ROWS, DIM, padding_idx=7)
    model.words.padding_idx = None
    model.more.weight = model.words.weight
    with torch.no_grad():
        model.words.weight[7] = 0


class Own(nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (tied, ValueError, r"words shares its weight with out.weight of a Linear.*skip=\['words'"),
        (differing, ValueError, r"words and more.weight share their weight, with padding_idx=None"),
        (lambda m: setattr(m.words, "max_norm", 1.0), ValueError, "words has max_norm=1.0"),
        (lambda m: setattr(m.towers["tags"], "scale_grad_by_freq", True), ValueError,
         "towers.tags has scale_grad_by_freq=True"),
        (lambda m: m.words.requires_grad_(False), ValueError, "words is frozen"),
        (lambda m: m.words.bfloat16(), ValueError, "words is of torch.bfloat16"),
        (lambda m: m.words.register_forward_hook(lambda *_: None), ValueError,
         r"words has hooks \(forward_hooks\)"),
        (lambda m: nn.init.ones_(m.words.weight), ValueError, r"row of padding \(0\) that is not"),
        (lambda m: setattr(m, "words", Own(ROWS, DIM)), TypeError, "words is a Own, whose forward"),
    ],
)  # fmt: skip
def test_what_ours_cannot_do_names_the_module_and_changes_nothing(change, error, message):
    model = made()
    change(model)
    before = list(model.modules())

    def body(_):
        with pytest.raises(error, match=message):
            ps.convert(model, min_rows=ROWS)
        assert list(model.modules()) == before
        return len(ps.stats()[0]["hashtables"])

    assert run_workers(1, body) == [0]


def test_what_is_skipped_stays():
    def body(_):
        model = made()
        model.words.max_norm = 1.0
        ps.convert(model, min_rows=ROWS, skip=["words"])
        assert type(model.words) is nn.Embedding
        assert isinstance(model.towers["tags"], ps.EmbeddingBag)
        with pytest.raises(ValueError, match=r"skip names \['word'\], and the model has no such"):
            ps.convert(made(), min_rows=ROWS, skip=["word"])
        return True

    assert run_workers(1, body) == [True]


def test_small_embeddings_stay_and_an_embedding_by_itself_is_returned():
    def body(_):
        model = made()
        assert ps.convert(model) is model
        assert type(model.words) is nn.Embedding
        alone = nn.Embedding(ROWS, DIM)
        weight = alone.weight.detach().clone()
        ours = ps.convert(alone, min_rows=1).eval()
        assert torch.equal(ours(torch.arange(ROWS)), weight)
        return True

    assert run_workers(1, body) == [True]


def test_a_second_model_needs_names_of_its_own():
    def body(_):
        ps.convert(made(), min_rows=ROWS)
        with pytest.raises(ValueError, match=r"a table 'words' already.* prefix="):
            ps.convert(made(), min_rows=ROWS)
        second = ps.convert(made(), min_rows=ROWS, prefix="b.")
        return second.words.table.name

    assert run_workers(1, body) == ["b.words"]


def test_bags_keep_their_options():
    def body(_):
        plain = nn.EmbeddingBag(ROWS, DIM, mode="max", padding_idx=3, include_last_offset=True)
        ids, offsets = torch.randint(0, ROWS, (20,)), torch.tensor([0, 4, 11, 20])
        expected = plain(ids, offsets)
        ours = ps.convert(plain, min_rows=1)
        assert torch.equal(ours(ids, offsets), expected)
        return True

    assert run_workers(1, body) == [True]


@pytest.mark.usefixtures("wire")
def test_rows_are_compressed_if_asked():
    def body(_):
        model = ps.convert(
            made(), min_rows=ROWS, optimizer=ps.optim.SGD(0.1), compression="int8",
            pull_compression="fp16",
        )  # fmt: skip
        expected = weights.to(torch.float16).float()
        got = model.words(torch.arange(1, ROWS)).detach()
        assert torch.equal(model.state_dict()["words.weight"], weights)  # as the servers have it
        loss_of(model, batches(1)[0, 0]).backward()
        return torch.equal(got, expected[1:]), model.words.pushed.wait().applied

    weights = made().words.weight.detach()
    assert run_workers(1, body) == [(True, True)]


def test_hybrid_needs_an_embedding_and_any_of_ours_is_one():
    def body(_):
        model = made()
        sgd = torch.optim.SGD(model.head.parameters(), 0.1)
        with pytest.raises(ValueError, match="nothing is left"):
            ps.DistributedOptimizer(sgd, hybrid="ring")
        ps.Embedding(None, DIM, name="e")
        with pytest.raises(ValueError, match=r"hybrid='ring' it can be 'fp16'"):
            ps.DistributedOptimizer(sgd, hybrid="ring", compression="int8")
        half = hvd.Compression.fp16
        assert ps.DistributedOptimizer(sgd, hybrid="ring", compression=half) is not None
        return True

    assert run_workers(1, body) == [True]
