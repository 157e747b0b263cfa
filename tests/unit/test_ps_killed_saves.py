"""A save that is killed at any moment leaves the checkpoint that it writes, or the one before."""

import numpy as np
import pytest
from file_operations import Disk, watched
from ps_ranks_as_threads import run_workers

from ringcomm import ps
from ringcomm.ps.checkpoint import files

N_SAVES, COUNT, KEYS = 3, 900, 20


def save_again_and_again(root, note):
    """Save values that are the step; one partition stays as it is, and is linked."""
    w = ps.table("w", COUNT, updater=ps.optim.Add(), block_nbytes=2000)
    still = ps.table("still", 3, updater=ps.optim.Add())
    still.push(np.full(3, 7.0, np.float32)).wait()
    rows = ps.hashtable("rows", 2, updater=ps.optim.Add())
    for step in range(1, N_SAVES + 1):
        w.push(np.ones(COUNT, np.float32)).wait()
        rows.push(range(KEYS), np.ones((KEYS, 2), np.float32)).wait()
        ps.save(root, step=step, keep=1).wait()
        note(step)


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Return each state of the files, with the number of saves that were complete before it."""
    with pytest.MonkeyPatch.context() as patch:
        return states_of(tmp_path_factory.mktemp("states") / "saves", patch)


def states_of(root, monkeypatch):
    disk, states, saved = Disk(root, monkeypatch), [], [0]

    def look(_name):
        found = disk.files()
        if not states or found != states[-1][1]:
            states.append((saved[-1], found))

    with watched(look):
        run_workers(1, lambda _: save_again_and_again(root, saved.append), 2)
    return states


def write(files_of_state, root):
    for path, content in files_of_state.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)


def require_last_or_the_one_before(root, n_saved):
    complete = files.complete(root)
    if not complete:
        assert n_saved == 0
        return
    step = files.read_manifest(complete[0])["step"]
    assert step in (n_saved, n_saved + 1)
    found = ps.load_state_dict(root)  # the older one is not asked for help, or this fails:
    assert np.all(found["w"] == step)
    assert np.all(found["still"] == 7)
    assert len(found["rows"]["keys"]) == KEYS
    assert np.all(found["rows"]["values"] == step)


@pytest.mark.long
def test_after_each_operation_on_files_the_newest_checkpoint_is_whole(states, tmp_path):
    for number, (n_saved, state) in enumerate(states):
        for k, how in enumerate(("killed", "without power")):
            root = tmp_path / f"{number} {how}"
            write({path: content[k] for path, content in state.items()}, root)
            require_last_or_the_one_before(root, n_saved)
    assert {n_saved for n_saved, _ in states} >= {*range(N_SAVES)}
    assert len(states) > 15 * N_SAVES


@pytest.mark.long
def test_the_next_save_removes_what_a_killed_one_has_left(states, tmp_path):
    root = tmp_path / "left"
    state = next(state for n_saved, state in states if n_saved == 1 and len(folders(state)) == 2)
    write({path: content[0] for path, content in state.items()}, root)
    run_workers(1, lambda _: save_again_and_again(root, lambda _: None), 1)
    assert len([*root.iterdir()]) == 1


def folders(state):
    return {path.parts[0] for path in state}
