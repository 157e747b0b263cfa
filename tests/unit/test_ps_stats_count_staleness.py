"""How stale an async push is: the updates since the values that it was computed of."""

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps

pytestmark = pytest.mark.usefixtures("wire")
ONE = np.ones((1, 2), np.float32)


def staleness_of(name):
    told = ps.stats()[0]
    return (
        told["hashtables"][name]["staleness"]
        if name == "emb"
        else told["tables"][name]["0"]["staleness"]
    )


def opened(kind):
    """Return what pushes to a table of that kind, and what pulls from it."""
    if kind == "dense":
        t = ps.table("w", 2, updater=ps.optim.Add())
        return "w", lambda: t.push(ONE[0]).wait(), lambda: t.pull().wait()
    kv = ps.hashtable("emb", 2, updater=ps.optim.Add())
    return "emb", lambda: kv.push([1], ONE).wait(), lambda: kv.pull([1]).wait()


@pytest.mark.parametrize("kind", ["dense", "rows"])
def test_what_is_pushed_without_a_pull_is_staler_and_staler(kind):
    """A push is told the version that it made: nobody has seen the values of that."""

    def body(rank):
        name, push, pull = opened(kind)
        pull()
        rc.barrier()
        for _ in range(5):
            for turn in range(2):
                if rank == turn:
                    push()
                rc.barrier()
        without = staleness_of(name)
        rc.barrier()
        if rank == 0:
            pull()
            push()
        rc.barrier()
        return without, staleness_of(name)

    for without, after_a_pull in run_workers(2, body):
        assert without == {str(missed): 1 for missed in range(10)}
        assert after_a_pull == {**without, "0": 2}
