"""Whatever operator.index() takes is an integer everywhere; bool is none where it was none."""

import numpy as np
import pytest
from harness import run_ranks
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import codec, ps
from ringcomm.elastic.commit_file import KeptFile
from ringcomm.engine.api.program_parameters import _checked
from ringcomm.integers import is_integer

N = np.int64
SGD = ps.optim.SGD(0.1)


@pytest.mark.parametrize("value", [3, N(3), np.uint8(3), np.array(3)], ids=repr)
def test_integers(value):
    assert is_integer(value)


@pytest.mark.parametrize(
    "value",
    [True, np.True_, 3.0, np.float64(3), "3", None, [3], np.arange(3)],
    ids=repr,
)
def test_no_integers(value):
    assert not is_integer(value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: rc.Group(np.arange(2)),
        lambda: rc.Group([N(0), N(1)]),
        lambda: rc.broadcast(np.ones(2), N(1)),
        lambda: rc.broadcast_object(3, N(1)),
        lambda: rc.allreduce_async(np.ones(2)).wait(N(60)),
        lambda: rc.alltoall(np.ones(4), splits=np.array([2, 2])),
        lambda: rc.alltoall(np.ones(4), splits=[N(2), N(2)]),
        lambda: rc.sendrecv(np.ones(2), N(1 - rc.rank()), np.ones(2), N(1 - rc.rank())),
        lambda: rc.explain(N(100), "float32"),
        lambda: list(rc.data.ShardedSampler(N(4), seed=N(2)).batches(N(2))),
        # Rank 0 keeps the queue, until the other one has heard that it is empty.
        lambda: (list(rc.data.WorkQueue(N(4), N(2), name="q", seed=N(3))), rc.barrier()),
    ],
)
def test_the_core_takes_integers_of_numpy(call):
    run_ranks(2, lambda _: [call()])


@pytest.mark.parametrize(
    "call",
    [
        lambda: ps.table("w", N(10), updater=SGD, mode="sync", block_nbytes=N(4096)),
        lambda: ps.table("w", (N(2), N(5)), updater=SGD, mode=ps.SSP(N(1))),
        lambda: ps.table("w", 10, updater=ps.optim.SGD(N(1)), mode=ps.FirstOf(N(1))),
        lambda: ps.table("w", 10, updater=ps.optim.SGD(np.float32(0.5)), mode="sync"),
        lambda: ps.hashtable("h", dim=N(4), updater=SGD).rows(N(3)),
        lambda: ps.hashtable("h", dim=4, updater=SGD).pull([N(3), 2**63]).wait(N(60)),
        lambda: ps.hashtable("h", dim=4, updater=SGD, evict=ps.Evict(max_rows=N(40))),
        lambda: ps.hashtable("h", dim=4, updater=SGD, evict=ps.Evict(ttl=N(40))),
        lambda: ps.hashtable("h", dim=4, updater=SGD, admit=ps.Admit(N(2), max_candidates=N(9))),
        lambda: ps.hashtable("h", dim=4, updater=SGD, compression=codec.Int8(N(256), N(1))),
        lambda: ps.hashtable("h", dim=4, updater=SGD, init=ps.initializers.normal(N(1), seed=N(2))),
    ],
)
def test_servers_take_numbers_of_numpy(call):
    run_workers(1, lambda *_: [call()])


def test_a_table_may_be_opened_with_numbers_of_numpy_on_one_rank_and_of_python_on_another():
    def body(rank, *_):
        n = N if rank else int
        ps.hashtable("h", dim=n(4), updater=ps.optim.SGD(n(1)), evict=ps.Evict(max_rows=n(40)))

    run_workers(2, body)


def test_settings_of_commits_and_parameters(tmp_path):
    assert KeptFile(tmp_path / "commits", N(3))._every == 3
    with pytest.raises(ValueError, match="number of commits"):
        KeptFile(tmp_path / "commits", 1.5)
    assert type(_checked("n", N(3))) is int
    assert _checked("flag", True) is True
