"""MPI's memory that another user has made before us is refused, before a rank sends by it."""

import mmap
import os
import tempfile
from pathlib import Path

import pytest
from other_users import OTHER, give_to_another, shared_folder, write_as_another

from ringcomm.errors import ConfigError
from ringcomm.launched import mpi_defaults
from ringcomm.transport import start_mpi
from ringcomm.transport.start_mpi import refuse_memory_of_others, why_segments_untrusted

NAME = "sm_segment.h1.0.5ee00001.0"


@pytest.fixture
def mapped(tmp_path):
    """Yield a function that maps a file as MPI does, and closes it."""
    held = []

    def map_it(path):
        with path.open("r+b") as file:
            held.append(mmap.mmap(file.fileno(), 0))

    yield map_it
    for each in held:
        each.close()


def own(folder, mode=0o600):
    path = folder / NAME
    path.write_bytes(bytes(8192))
    path.chmod(mode)
    return path


def test_memory_that_this_user_has_made_is_taken(mapped, tmp_path):
    mapped(own(tmp_path))
    (tmp_path / "table").write_bytes(bytes(8192))
    (tmp_path / "table").chmod(0o666)
    mapped(tmp_path / "table")
    assert why_segments_untrusted() == ""


def test_memory_whose_name_another_user_has_claimed_is_refused(mapped, monkeypatch):
    with shared_folder() as folder:
        path = folder / NAME
        write_as_another(path, bytes(8192), monkeypatch, mode=0o666)
        mapped(path)
        text = why_segments_untrusted()
    assert text.startswith(f"{path}, MPI's memory, ")
    assert f"belongs to user {OTHER}" in text or "mode 0666" in text


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o640, 0o604])
def test_memory_that_others_can_open_is_refused(mode, mapped, tmp_path):
    mapped(own(tmp_path, mode))
    assert f"can be opened by others (mode {mode:04o})" in why_segments_untrusted()


def test_memory_that_has_lost_its_name_is_refused(mapped, tmp_path):
    path = own(tmp_path)
    mapped(path)
    assert why_segments_untrusted(0) == ""
    assert why_segments_untrusted(1) == "MPI's memory in /dev/shm/ has lost its name"
    os.rename(path, tmp_path / "kept")  # the map shows the new name
    assert why_segments_untrusted(0) == "MPI's memory in /dev/shm/ has lost its name"
    os.rename(tmp_path / "kept", path)
    os.unlink(path)
    assert "was taken away" in why_segments_untrusted()
    own(tmp_path)
    assert "was taken away" in why_segments_untrusted()  # it shows "(deleted)"


def test_memory_of_another_user_is_refused_by_any_name(mapped, monkeypatch):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as mine:
        path = Path(mine.name)
        path.write_bytes(bytes(8192))
        mapped(path)
        assert why_segments_untrusted() == ""
        give_to_another(path, monkeypatch)
        assert f"{path}, MPI's memory, belongs to user " in why_segments_untrusted()
        monkeypatch.undo()


def test_a_job_stops_before_its_ranks_send_by_such_memory(mapped, tmp_path):
    mapped(own(tmp_path))
    refuse_memory_of_others(0)
    with pytest.raises(ConfigError, match="lost its name: others could read and change what ranks"):
        refuse_memory_of_others(1)


ON_ONE_HOST = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
}


@pytest.mark.parametrize(
    ("environ", "shares", "found"),
    [
        ({}, True, None),
        (ON_ONE_HOST, True, 3),
        (ON_ONE_HOST, False, None),
        (ON_ONE_HOST | {"OMPI_COMM_WORLD_SIZE": "8"}, True, None),
        (ON_ONE_HOST | {"OMPI_MCA_btl": "self,sm,tcp"}, True, None),
        (ON_ONE_HOST | {"OMPI_MCA_pml": "ucx"}, True, None),
        (dict.fromkeys(ON_ONE_HOST, "1"), True, None),
    ],
)
def test_a_rank_must_have_such_memory_if_it_has_no_other_way(environ, shares, found):
    environ = dict(environ)
    added = mpi_defaults.set_mpi_defaults(environ, lambda _: shares)
    assert mpi_defaults.rank_with_segment(added, environ) == found


def test_a_sandbox_that_hides_proc_stops_no_job(monkeypatch, tmp_path):
    monkeypatch.setattr(start_mpi, "_MAPS", str(tmp_path / "none"))
    assert why_segments_untrusted(0) == ""
