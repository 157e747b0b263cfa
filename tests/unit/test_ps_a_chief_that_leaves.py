"""The chief leaves while others train: the next worker does what they could not do without one."""

import threading

import numpy as np
from harness import DEADLINE_S
from ps_ranks_as_threads import ended, run_all
from ps_training_of_two_tables import train

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.checkpoint import files
from ringcomm.ps.job import session


def tables(mode):
    table = ps.table("w", 600, "float64", updater=ps.optim.Add(), mode=mode, block_nbytes=1600)
    return table, ps.hashtable("emb", 2, updater=ps.optim.Add(), mode=mode, dtype="float64")


def await_departure_of_the_chief():
    """Return on another worker once it knows that worker 0 has left."""
    peers = session().engine.watch.peers
    assert session().client.drive_until(lambda: 0 in peers.left, "test", DEADLINE_S)


def test_the_next_worker_goes_on_with_saves_every_so_many_steps(tmp_path):
    fourth_step = threading.Barrier(3)  # if the chief left in it, worker 1 would save in it
    last_step = threading.Barrier(2)  # if worker 1 left before it, worker 2 would save in it

    def body(rank):
        opened = tables("sync")
        ps.save(tmp_path, every_steps=2, keep=None)
        for step in range(8):
            if step == 4:
                fourth_step.wait(DEADLINE_S)
                if rank == 0:
                    return "left"
                await_departure_of_the_chief()
            train(*opened, [step])
            if session().last_save is not None:
                session().last_save.wait()
        last_step.wait(DEADLINE_S)
        assert not ps.is_chief()  # what a script does at its end is done once
        return "trained"

    results = ended(run_all(3, body, 2), 0)
    assert results[:3] == ["left", "trained", "trained"]
    found = [files.read_manifest(each)["step"] for each in reversed(files.complete(tmp_path))]
    assert found == [1, 3, 5, 7]


def test_a_job_that_a_signal_stops_is_saved(tmp_path):
    def body(rank):
        opened = tables("async")
        ps.save(tmp_path, every_s=3600)
        train(*opened, [0])
        rc.barrier()
        if rank == 0:
            return
        await_departure_of_the_chief()
        train(*opened, range(1, 5))
        for save in session().engine.control.checkpoints:  # as all workers do after a signal
            save(5)

    ended(run_all(3, body, 2), 0)
    assert files.read_manifest(files.complete(tmp_path)[0])["step"] == 5
    assert ps.load_state_dict(tmp_path)["w"].tolist() == [1.0 + 2 * (1 + 2 + 3 + 4 + 5)] * 600


def test_a_table_that_is_opened_then_begins_with_the_values_of_the_next_worker():
    def body(rank):
        ps.table("w", 3)
        rc.barrier()
        if rank == 0:
            return "left"
        await_departure_of_the_chief()
        table = ps.table("new", 5, "float64", init=np.arange(5.0) + rank)
        return table.pull().wait().tolist()

    first = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert ended(run_all(3, body, 2), 0)[:3] == ["left", first, first]
