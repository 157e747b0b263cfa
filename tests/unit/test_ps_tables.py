"""Dense tables: what is pushed is what is pulled, on any number of servers and workers."""

import sys

import numpy as np
import pytest
from harness import outcomes

import ringcomm as rc
from ringcomm import ps
from ringcomm.engine.world import engine

pytestmark = pytest.mark.usefixtures("wire")


def run_workers(n_workers, body, n_servers=1, **options):
    """Run body(rank) on the workers of a job; return what they return."""

    def main(rank):
        try:
            ps.init(n_servers, deadline_s=10, **options)
            return body(rank)
        except SystemExit as ended:
            return f"served, {ended.code}"
        finally:
            if sys.exception() is None or isinstance(sys.exception(), SystemExit):
                engine().leave("done")

    results = outcomes(n_workers + n_servers, main)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    assert results[n_workers:] == ["served, 0"] * n_servers
    return results[:n_workers]


@pytest.mark.parametrize("n_servers", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 7, 1000, 100_003])
def test_what_is_added_by_all_is_pulled_by_all(count, n_servers):
    def body(rank):
        t = ps.table("w", count, updater=ps.optim.Add(), block_nbytes=60_000)
        for _ in range(3):
            assert t.push(np.full(count, rank + 1.0, np.float32)).wait().applied
        rc.barrier()
        return t.pull().wait()

    for values in run_workers(2, body, n_servers):
        assert values.shape == (count,)
        assert (values == 9).all()


def test_workers_are_the_default_group():
    assert run_workers(3, lambda _: (rc.rank(), rc.size(), ps.rank(), ps.size()), 2) == [
        (rank, 3, rank, 3) for rank in range(3)
    ]


def test_the_chief_s_values_are_what_a_table_begins_with():
    def body(rank):
        t = ps.table("w", (3, 4), init=np.full((3, 4), rank + 5.0))
        return t.pull().wait()

    for values in run_workers(2, body):
        assert (values == 5).all()


@pytest.mark.parametrize("n_servers", [1, 3])
def test_a_round_is_one_update_with_the_weighted_mean(n_servers):
    def body(rank):
        t = ps.table("w", 1000, updater=ps.optim.SGD(1.0), mode="sync", block_nbytes=900)
        for step in range(5):
            t.push(np.full(1000, -(rank + 1.0 + step), np.float32), weight=rank + 1)
            values = t.pull().wait()
        return values

    expected = sum((1 * (1 + s) + 2 * (2 + s) + 3 * (3 + s)) / 6 for s in range(5))
    for values in run_workers(3, body, n_servers):
        np.testing.assert_allclose(values, expected, rtol=1e-6)


def test_a_worker_that_raises_ends_the_servers():
    def main(rank):
        ps.init(1, deadline_s=10)
        raise ValueError("boom")

    results = outcomes(2, main)
    assert isinstance(results[0], ValueError)
    assert isinstance(results[1], rc.PeerFailedError)
