"""Loader: the batches of a rank, made ready ahead."""

import itertools
import math
import threading
from collections import namedtuple

import numpy as np
import pytest
from harness import wait_until

import ringcomm as rc
from ringcomm.data import Loader, ShardedSampler

PREFETCH = pytest.mark.parametrize("prefetch", [0, 1, 3])


def loader(data, batch_size=4, *, rank=0, size=2, sampling=(), **kwargs):
    n = kwargs.pop("n", None) or len(data[0] if isinstance(data, tuple) else data)
    sampler = ShardedSampler(n, rank=rank, size=size, **dict(sampling))
    return Loader(data, batch_size, sampler=sampler, **kwargs)


def columns(n):
    return np.arange(n), np.arange(n)[:, None] * [1.0, -1.0]


class Squares:
    """A dataset that says which samples were asked for, and by whom."""

    def __init__(self, n, bad=None, error=None):
        self.n, self.bad, self.error = n, bad, error
        self.asked, self.threads = [], set()

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.asked.append(i)
        self.threads.add(threading.current_thread().name)
        if i == self.bad:
            raise self.error
        return i, np.full(2, i * i, np.float32)


class Optimizer:
    def __init__(self):
        self.told = []

    def set_samples(self, n):
        self.told.append(n)


def no_loader_thread():
    return all(thread.name != "ringcomm-loader" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    wait_until(no_loader_thread, "a loader's thread is left")


# --- batches ------------------------------------------------------------------------------------
@PREFETCH
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_dataset", [True, False])
def test_each_sample_comes_once_per_epoch_and_with_its_label(prefetch, size, is_dataset):
    data = Squares(23) if is_dataset else (np.arange(23), np.arange(23)[:, None] ** 2 * [1, 1])
    seen = []
    for rank in range(size):
        one = loader(
            data, 3, rank=rank, size=size, prefetch=prefetch, sampling={"remainder": "uneven"}
        )
        lengths = len(one)
        batches = list(one)
        assert len(batches) == lengths == math.ceil(math.ceil(23 / size) / 3)
        for i, squares in batches:
            assert np.array_equal(squares, np.stack([i * i, i * i], 1))
            seen += i.tolist()
    assert sorted(seen) == list(range(23))


@PREFETCH
def test_every_iteration_is_another_epoch(prefetch):
    one = loader(columns(20), size=1, prefetch=prefetch)
    first, second = ([i.tolist() for i, _ in one] for _ in range(2))
    assert first != second
    one.set_epoch(0)
    assert [i.tolist() for i, _ in one] == first


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "data",
    [
        {"x": np.arange(8), "y": np.zeros((8, 2))},
        np.zeros((8, 3)),
        Pair(np.arange(8), np.zeros((8, 2))),
    ],
)
def test_a_batch_has_the_structure_of_the_data(data):
    batch = next(iter(loader(data, n=8, size=1)))
    assert type(batch) is type(data)
    for name in getattr(data, "_fields", ()) or (data if isinstance(data, dict) else ()):
        part = getattr(batch, name) if isinstance(data, Pair) else batch[name]
        assert len(part) == 4
    if isinstance(data, np.ndarray):
        assert batch.shape == (4, 3)


def test_samples_of_any_structure_are_stacked():
    samples = [{"x": (i, [i / 2]), "name": str(i), "p": Pair(i, True)} for i in range(4)]
    batch = next(iter(loader(samples, size=1, sampling={"shuffle": False})))
    assert batch["x"][0].tolist() == [0, 1, 2, 3]
    assert batch["x"][1][0].tolist() == [0, 0.5, 1, 1.5]
    assert batch["name"] == ["0", "1", "2", "3"]
    assert batch["p"].b.dtype == bool


def test_collate_and_getitems_of_the_user_are_used():
    class Fetched(Squares):
        def __getitems__(self, indices):
            return [("fetched", i) for i in indices]

    batch = next(iter(loader(Fetched(8), collate=list, sampling={"shuffle": False}, size=1)))
    assert batch == [("fetched", i) for i in range(4)]


@pytest.mark.parametrize("is_dataset", [True, False])
def test_an_empty_batch_is_like_any_other_without_rows(is_dataset):
    """5 samples on 2 ranks, one at a time: rank 1 has nothing for the third batch."""
    data = Squares(5) if is_dataset else (np.arange(5), np.zeros((5, 2), np.float32))
    optimizer = Optimizer()
    batches = list(loader(data, 1, rank=1, sampling={"remainder": "uneven"}, optimizer=optimizer))
    assert [len(i) for i, _ in batches] == [1, 1, 0]
    assert batches[-1][1].shape == (0, 2)
    assert batches[-1][1].dtype == np.float32
    assert optimizer.told == [1, 1, 0]


# --- the optimizer and the state ----------------------------------------------------------------
@PREFETCH
def test_the_optimizer_is_told_the_samples_of_a_batch_as_it_is_handed_out(prefetch):
    optimizer = Optimizer()
    data = Squares(10)
    one = loader(data, size=1, optimizer=optimizer, prefetch=prefetch)
    told = []
    for _ in one:
        told.append(list(optimizer.told))
        if prefetch == 3:
            wait_until(lambda: len(data.asked) == 10, "nothing was read ahead")
    assert told == [[4], [4, 4], [4, 4, 2]]


def test_a_plain_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"optimizer is a DistributedOptimizer, not a plain object"):
        loader(columns(4), optimizer=object())


@PREFETCH
@pytest.mark.parametrize("n_batches", [0, 1, 3, 5])
def test_a_state_counts_what_was_handed_out_and_not_what_was_read_ahead(prefetch, n_batches):
    whole = [i.tolist() for i, _ in itertools.islice(endless(loader(columns(20), size=1)), 10)]
    one = loader(columns(20), size=1, prefetch=prefetch)
    before = [i.tolist() for i, _ in itertools.islice(one, n_batches)]
    state = one.state_dict()
    again = loader(columns(20), size=1)
    again.load_state_dict(state)
    after = [i.tolist() for i, _ in itertools.islice(endless(again), 10 - n_batches)]
    assert before + after == whole


def endless(one):
    while True:
        yield from one


def test_a_state_after_the_last_epoch_is_the_next_one():
    one = loader(columns(20), size=1)
    list(one)
    assert one.state_dict()["epoch"] == 1
    again = loader(columns(20), size=1)
    again.load_state_dict(one.state_dict())
    assert again.sampler.epoch == 1


def test_a_state_is_resumed_on_another_number_of_ranks():
    seen, states = [], []
    for rank in range(2):
        one = loader(columns(20), 3, rank=rank, sampling={"remainder": "uneven"})
        seen += [i for batch, _ in itertools.islice(one, 2) for i in batch.tolist()]
        states.append(one.state_dict())
    for rank in range(3):
        one = loader(columns(20), 3, rank=rank, size=3, sampling={"remainder": "uneven"})
        one.load_state_dict(states)
        seen += [i for batch, _ in one for i in batch.tolist()]
    assert sorted(seen) == list(range(20))


# --- ahead --------------------------------------------------------------------------------------
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_as_many_batches_as_asked_for_are_ready_before_they_are_wanted(prefetch):
    data = Squares(100)
    batches = iter(loader(data, size=1, prefetch=prefetch))
    for n_taken in (1, 2):
        next(batches)
        ready = 4 * (prefetch + n_taken)
        wait_until(
            lambda: len(data.asked) == ready,  # noqa: B023
            lambda: f"{len(data.asked)} samples are loaded or taken, not {ready}",  # noqa: B023
        )
    assert data.threads == {"ringcomm-loader"}
    batches.close()
    assert len(data.asked) == 4 * (prefetch + 2)


def test_without_prefetching_samples_are_read_as_they_are_wanted_in_the_caller_s_thread():
    data = Squares(100)
    batches = iter(loader(data, size=1, prefetch=0))
    next(batches)
    assert len(data.asked) == 4
    assert data.threads == {threading.current_thread().name}


@pytest.mark.parametrize("leave", ["break", "begin anew", "drop"])
def test_a_loader_that_is_left_ends_its_thread(leave):
    one = loader(Squares(100), size=1)
    batches = iter(one)
    next(batches)
    if leave == "begin anew":
        batches = iter(one)
    elif leave == "break":
        for _ in batches:
            break
        batches.close()
    del one, batches


@PREFETCH
@pytest.mark.parametrize("error", [ValueError("bad sample"), StopIteration(), TimeoutError("read")])
def test_what_a_dataset_raises_is_raised_at_its_batch(prefetch, error):
    data = Squares(20, bad=9, error=error)
    got = []
    kind = RuntimeError if isinstance(error, StopIteration) else type(error)
    one = loader(data, size=1, prefetch=prefetch, sampling={"shuffle": False})
    with pytest.raises(kind) as caught:
        got.extend(i.tolist() for i, _ in one)
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7]]
    raised = caught.value if kind is type(error) else caught.value.__cause__
    assert raised is error
    assert "in Loader, at samples 8, 9, 10, 11" in raised.__notes__[-1]


@pytest.mark.long
def test_a_dataset_that_hangs_is_told_of(monkeypatch):
    monkeypatch.setenv("RINGCOMM_TIMEOUT_S", "0.2")
    goes_on = threading.Event()

    class Hanging(Squares):
        def __getitem__(self, i):
            if i == 5:
                goes_on.wait(60)
                return super().__getitem__(i)
            return super().__getitem__(i)

    batches = iter(loader(Hanging(20), size=1, sampling={"shuffle": False}))
    next(batches)
    threading.Timer(1, goes_on.set).start()
    with pytest.raises(TimeoutError, match=r"4 samples into epoch 0.*RINGCOMM_TIMEOUT_S=0\.2"):
        next(batches)


# --- what is refused ----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("data", "n", "kwargs", "error", "message"),
    [
        ((np.zeros(3), np.zeros(4)), 3, {}, ValueError, r"different lengths: \[3, 4\]"),
        (np.zeros(3), 4, {}, ValueError, "the data has 3 samples, the sampler 4"),
        (iter([1]), 1, {}, TypeError, "not a list_iterator"),
        (np.zeros(3), 3, {"prefetch": -1}, ValueError, "prefetch is at least 0, not -1"),
        (np.zeros(3), 3, {"batch_size": 0}, ValueError, "batch_size is at least 1, not 0"),
    ],
)
def test_arguments_that_are_refused(data, n, kwargs, error, message):
    sampler = ShardedSampler(n, rank=0, size=1)
    with pytest.raises(error, match=message):
        Loader(data, **({"batch_size": 2, "sampler": sampler} | kwargs))


def test_rc_data_is_there_without_an_import_of_its_own():
    assert rc.data.Loader is Loader
