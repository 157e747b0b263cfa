"""What can run code is read from no file that another user can have written.

test_elastic_commit_file.py has the cases, as a job that is started again sees them.
"""

import os
import pickle
import stat

import pytest
from other_users import IS_ROOT, shared_folder, write_as_another

from ringcomm.errors import RingcommError
from ringcomm.gpu.kernels import kernel_cache
from ringcomm.launch import run, run_rank
from ringcomm.regular_files import BrokenFileError
from ringcomm.trusted_files import read_trusted, why_untrusted


def attack(marker):
    """Return a pickle that makes a file when it is read."""
    return b"cos\nopen\n(V%s\nI%d\ntR." % (os.fsencode(marker), os.O_CREAT | os.O_WRONLY)


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def no_mask():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.parametrize("mode", [0o660, 0o620, 0o666])
def test_who_does_not_mend_the_mode_refuses_what_a_group_can_write(mode, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    path.chmod(mode)
    with pytest.raises(BrokenFileError, match=f"mode {mode:04o}") as refused:
        read_trusted(path)
    assert why_untrusted(path) == str(refused.value)
    assert mode_of(path) == mode
    path.chmod(0o644)
    assert (read_trusted(path), why_untrusted(path)) == (b"content", "")


@pytest.mark.skipif(not IS_ROOT, reason="only root can give files away")
@pytest.mark.parametrize(("owner", "is_taken"), [(0, True), (1, True), (2, False)])
def test_a_user_trusts_root_and_no_other_user(owner, is_taken, tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"content")
    os.chown(path, owner, owner)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    assert bool(why_untrusted(path)) is not is_taken


def test_a_report_of_another_user_is_no_report_of_a_rank(tmp_path, monkeypatch):
    with shared_folder() as folder:
        path = run_rank.report_path(folder, 1)
        write_as_another(path, attack(tmp_path / "ran"), monkeypatch)
        with pytest.raises(RingcommError, match=r"in which rank 1 reports, belongs to user"):
            run._read(folder, 1)
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_mask")
def test_a_rank_calls_no_function_that_another_user_has_written(tmp_path, monkeypatch):
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    with shared_folder() as folder:
        write_as_another(folder / run_rank.CALL, attack(tmp_path / "ran"), monkeypatch)
        with pytest.raises(BrokenFileError, match="belongs to user"):
            run_rank.main(str(folder))
        monkeypatch.undo()
        report = run._read(folder, 0)
        assert mode_of(run_rank.report_path(folder, 0)) == 0o600
    assert not (tmp_path / "ran").exists()
    assert "belongs to user" in report.error


def test_a_kernel_that_another_user_has_written_is_compiled_anew(tmp_path, monkeypatch):
    def compiled(folder):
        return kernel_cache.compiled_once(folder, ("source",), lambda: b"good")

    compiled(tmp_path)
    (name,) = (path.name for path in tmp_path.iterdir())
    bad = kernel_cache._digest(b"bad") + b"bad"
    with shared_folder() as folder:
        write_as_another(folder / name, bad, monkeypatch)
        assert compiled(folder) == b"good"
    monkeypatch.undo()
    (tmp_path / name).write_bytes(bad)
    assert compiled(tmp_path) == b"bad"  # the digest is right
    (tmp_path / name).chmod(0o660)
    assert compiled(tmp_path) == b"good"
    assert mode_of(tmp_path / name) == 0o600


@pytest.mark.usefixtures("no_mask")
def test_what_a_rank_reports_is_its_users_alone_whatever_the_umask(tmp_path):
    run_rank._write(tmp_path / "rank-0", run_rank.RankReport(result=pickle.dumps(5)))
    assert mode_of(tmp_path / "rank-0") == 0o600
    assert pickle.loads(run._read(tmp_path, 0).result) == 5
