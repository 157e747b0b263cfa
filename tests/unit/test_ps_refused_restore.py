"""A checkpoint that the chief cannot restore ends a job that goes on after deaths, too.

Else the others would train from the first values, and their saves would remove the checkpoints.
"""

import numpy as np
import pytest
from harness import DEADLINE_S, wait_until
from ps_ranks_as_threads import Boom, ended, run_all, run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.atomic_files import paths_in
from ringcomm.config import Settings
from ringcomm.ps.checkpoint import files
from ringcomm.regular_files import BrokenFileError

ELASTIC = Settings(timeout_s=DEADLINE_S, elastic=1)
COUNT = 100


def opened(count=COUNT, mode="async"):
    return ps.table("w", count, "float64", updater=ps.optim.Add(), init=np.zeros(count), mode=mode)


@pytest.fixture
def saved(tmp_path):
    def body(_):
        opened().push(np.ones(COUNT)).wait()
        ps.save(tmp_path).wait()

    run_workers(1, body)
    return tmp_path


def content_of(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def damage(root):
    [path] = root.glob("save-*/server-0.data-*")
    path.write_bytes(path.read_bytes()[:-1])


WAYS = {"another shape": (99, ValueError), "damaged": (COUNT, BrokenFileError)}


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("call", [ps.restore, ps.load], ids=["restore", "load"])
def test_what_the_chief_cannot_restore_ends_all_and_stays_as_it_is(call, way, waits, saved):
    count, kind = WAYS[way]
    if way == "damaged":
        damage(saved)
    before = content_of(saved)

    def body(rank):
        table = opened(count, "sync" if waits else "async")
        if rank == 0:
            call(saved)
        ps.save(saved, every_steps=1, keep=1)
        while True:  # without collectives, so that no group is without one of its ranks
            table.push(np.ones(count)).wait()
            table.pull().wait()  # of a round, for which the chief is needed
            if rank == 1 and ps.is_chief():
                ps.complete_step()  # it saves, as the chief that follows

    chief, *others = run_all(3, body, 2, settings=ELASTIC)
    assert type(chief) is kind
    for each in others:  # servers, too
        assert isinstance(each, rc.PeerFailedError), each
        assert each.rank == 0
        assert f"raised {kind.__name__}: " in str(each)
        assert str(saved) in str(each)
    assert content_of(saved) == before


@pytest.mark.parametrize("odd", [0, 1])
def test_a_table_that_is_not_that_of_the_others_ends_all(odd, saved):
    """Whoever opens it first: nobody knows who is right, and the wrong one would save."""
    before = content_of(saved)

    def body(rank):
        opened(99 if rank == odd else COUNT)
        ps.save(saved, every_steps=1, keep=1)
        while True:
            opened().pull().wait()
            if rank != odd and ps.is_chief() and odd == 0:
                ps.complete_step()

    results = run_all(3, body, 1, settings=ELASTIC)
    mismatches = [each for each in results if isinstance(each, rc.MismatchError)]
    assert mismatches
    others = [each for each in results if each not in mismatches]
    assert all(isinstance(each, rc.PeerFailedError) for each in others), others
    assert content_of(saved) == before


def test_a_chief_that_goes_on_all_the_same_may_die_later(saved):
    def body(rank):
        table = opened(99)
        if rank == 0:
            with pytest.raises(ValueError, match="Nothing was changed"):
                ps.restore(saved)
            ps.complete_step()
            table.push(np.ones(99)).wait()
            raise Boom
        wait_until(lambda: table.pull().wait() is not None and ps.is_chief(), "no other chief")
        table.push(np.ones(99)).wait()
        return float(table.pull().wait()[0])

    lived = ended(run_all(2, body, 1, settings=ELASTIC), 1)
    assert lived == [2.0, "ended with 0"]


def test_where_a_server_sees_a_checkpoint_none_is_not_the_answer(saved, monkeypatch):
    """The folder is one of each host, or is not mounted where the chief is."""
    seen, complete = [], files.complete

    def unseen_first(root):
        seen.append(root)
        return [] if len(seen) == 1 else complete(root)

    monkeypatch.setattr(files, "complete", unseen_first)

    def body(_):
        opened()
        with pytest.raises(rc.RingcommError, match="all ranks share") as caught:
            ps.restore(saved)
        return str(caught.value)

    [text] = run_workers(1, body)
    expected = f"ps.restore: rank 0 sees no checkpoint in {saved}, and server 0, rank 1, sees save-"
    assert text.startswith(expected)


def test_a_folder_that_cannot_be_looked_into_is_not_an_empty_one(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    assert paths_in(tmp_path / "absent") == []
    for name in ("file", "link"):
        with pytest.raises(OSError, match=name):
            paths_in(tmp_path / name)
        with pytest.raises(OSError, match=name):
            files.complete(tmp_path / name)
