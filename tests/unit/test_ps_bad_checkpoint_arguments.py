"""Checkpoints refuse paths, steps and times that cannot be, at once, and save nothing."""

from pathlib import Path

import numpy as np
import pytest
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm.ps import job

STEPS = [-1, 1 << 62, 2**70, True, 0.5, "1"]
PATHS = ["", "a\0b", b"saved", 3, None]
OPTIONS = [
    *({"step": step} for step in STEPS),
    *({"keep": keep} for keep in (0, -1, True, 1.5)),
    *({"every_s": every_s} for every_s in (0, -1.0, float("nan"), True, "1", [1])),
    *({"every_steps": every} for every in (0, -1, 2.5, True, "1")),
    *({"every_s": 1.0, "keep": keep} for keep in (0, True)),
]


def in_a_job(body):
    def of_worker(_):
        table = ps.table("w", 3, init=np.arange(3.0))
        body()
        ps.complete_step()  # a save that was begun by mistake would come now
        return table.pull().wait().tolist()

    assert run_workers(1, of_worker) == [[0.0, 1.0, 2.0]]


def test_save_refuses_what_cannot_be(own_folder):
    def body():
        for options in OPTIONS:
            with pytest.raises((TypeError, ValueError), match=r"ps\.save: .*must be"):
                ps.save("saved", **options)

    in_a_job(body)
    assert not [*own_folder.iterdir()]


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_no_path_is_no_folder(own_folder, path):
    """The empty one would be the present folder."""

    def body():
        for call in (ps.save, ps.restore, ps.load, ps.recover, ps.load_state_dict):
            with pytest.raises((TypeError, ValueError), match=rf"ps\.{call.__name__}: path is "):
                call(path)
        with pytest.raises((TypeError, ValueError), match=r"ps\.save: path is "):
            ps.save(path, every_steps=1)
        with pytest.raises((TypeError, ValueError), match=r"ps\.export_safetensors: file is "):
            ps.export_safetensors("saved", path)

    in_a_job(body)
    assert not [*own_folder.iterdir()]


@pytest.mark.parametrize("path", ["", "a\0b", 3], ids=repr)
def test_init_refuses_to_recover_from_no_path(path, monkeypatch):
    monkeypatch.setattr(job.init_rank_size, "init", lambda: pytest.fail("it has begun"))
    with pytest.raises((TypeError, ValueError), match=r"ps\.init: recover is "):
        ps.init(recover=path)


def test_what_can_be_is_saved(own_folder):
    def body():
        for step in (0, np.int64(7), (1 << 62) - 1):
            made = ps.save(Path("saved"), step=step, keep=2**70, background=False).wait()
            assert made.parent == own_folder / "saved"
            assert ps.restore("saved")["step"] == step
        ps.save(".", step=1, background=False)

    in_a_job(body)
    assert len([*(own_folder / "saved").iterdir()]) == 3
    assert len([*own_folder.glob("save-*")]) == 1
