"""Checkpoints that the chief saves by itself, between two steps."""

import json
import threading

import numpy as np
import pytest
from harness import DEADLINE_S
from ps_ranks_as_threads import run_workers

import ringcomm as rc
from ringcomm import ps
from ringcomm.ps.checkpoint import files


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_all_workers_train_on_while_a_disk_writes_for_long(mode, tmp_path, monkeypatch):
    has_trained, add = threading.Event(), files.Writer.add

    def adding(writer, *args):
        assert has_trained.wait(DEADLINE_S)
        return add(writer, *args)

    monkeypatch.setattr(files.Writer, "add", adding)

    def body(rank):
        table = ps.table("w", 500, "float64", updater=ps.optim.Add(), mode=mode, block_nbytes=800)
        ps.save(tmp_path, every_steps=1000)
        for _ in range(50):
            table.push(np.ones(500)).wait()
            table.pull().wait()
            ps.complete_step()
        rc.barrier()
        assert not files.complete(tmp_path)  # the first save, of step 1, is under way
        has_trained.set()

    run_workers(2, body, 2)
    [saved] = files.complete(tmp_path)
    assert json.loads((saved / files.MANIFEST).read_text())["clock"] == 1
