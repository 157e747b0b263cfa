"""ps.restore() with replication=2 fails on one copy of a server: the two do not stay unlike."""

import contextlib

import numpy as np
import pytest
from harness import DEADLINE_S, wait_until
from ps_ranks_as_threads import ended, kill_server, run_all

from ringcomm import ps
from ringcomm.config import Settings
from ringcomm.ps.checkpoint.server import Store

pytestmark = pytest.mark.one_wire

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
KEYS = np.arange(60, dtype=np.uint64)
N = 600


@pytest.mark.usefixtures("wire")
@pytest.mark.parametrize("fails_at", ["primary", "follower"])
@pytest.mark.parametrize("phase", ["_prepare", "_commit"])
def test_what_is_acknowledged_after_a_restore_outlives_the_server(
    phase, fails_at, monkeypatch, tmp_path, caplog
):
    """As the disk of one host may fail, or its memory run out."""
    do, is_due = getattr(Store, phase), []

    def fail_on_one(store, request, content):
        if is_due and store._index == 0 and store.is_copy == (fails_at == "follower"):
            is_due.clear()
            store._prepared.pop(content["id"], None)  # as where it fails in the middle
            raise OSError("this host cannot read it")
        return do(store, request, content)

    monkeypatch.setattr(Store, phase, fail_on_one)

    def body(rank):
        add = ps.optim.Add()
        table = ps.table("w", N, "float64", updater=add, mode="async", block_nbytes=400)
        rows = ps.hashtable("emb", 2, updater=add, mode="async", dtype="float64")

        def push():
            table.push(np.ones(N)).wait()
            rows.push(KEYS, np.ones((60, 2))).wait()

        def values():
            return table.pull().wait(), rows.pull(KEYS).wait()

        push()
        ps.save(tmp_path, background=False)
        push()
        is_due.append(True)
        is_refused = pytest.raises(OSError, match="this host cannot read it")
        with is_refused if fails_at == "primary" else contextlib.nullcontext():
            ps.restore(tmp_path)
        assert not is_due
        push()
        wait_until(lambda: all(each["copies"] == 2 for each in ps.stats()), "no copies")
        before = values()
        kill_server(0)
        return before, values()

    results = run_all(1, body, 3, settings=ELASTIC, replication=2)
    before, after = ended(results, 1)[0]
    for mine, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    if fails_at == "follower":
        assert all((each == 2).all() for each in before)
    elif phase == "_prepare":
        assert all((each == 3).all() for each in before)
    differed = "the copy of server 0 on rank 2 has come to differ" in caplog.text
    assert differed == (fails_at == "follower" or phase == "_commit")
