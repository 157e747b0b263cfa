"""The backend is known where torch is imported and ringcomm is not, at next to no cost."""

import json
import logging
import os
import sys
from importlib.metadata import entry_points

import pytest
import torch.distributed as dist
from harness import LATE_IMPORTS, job_environment, run_command

import ringcomm.torch  # noqa: F401 - torch.distributed knows the backend from here on
from ringcomm import discovery
from ringcomm.errors import ConfigError
from ringcomm.torch.distributed.compat import checked_version

ALONE = """
import json, sys, time
import torch
found = {"modules": [name for name in sys.modules if name.startswith(("ringcomm", "mpi4py"))]}
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers as handlers
found["knows"] = [hasattr(dist.Backend, "RINGCOMM"), "mpi" in handlers]
found["env"] = handlers["env"].__module__
found["default"] = dist.Backend.default_device_backend_map["cpu"]
times = []
for _ in range(5):
    for name in found["modules"]:
        sys.modules.pop(name, None)
    handlers.pop("mpi", None)
    del dist.Backend.RINGCOMM
    dist.Backend._plugins.pop("RINGCOMM", None)  # which torch 2.6 looks at
    start = time.thread_time()
    import ringcomm.discovery
    ringcomm.discovery.register_quietly()
    times.append(time.thread_time() - start)
found["ms"] = 1e3 * min(times)
print(json.dumps(found))
"""


def run(text, cwd, env=None):
    done = run_command([sys.executable, "-c", text], env=job_environment(env), cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_torch_makes_the_backend_known_and_loads_nothing_of_the_engine(tmp_path):
    found = json.loads(run(ALONE, tmp_path))
    assert set(found["modules"]) <= {"ringcomm", "ringcomm._version", "ringcomm.discovery"}
    assert found["knows"] == [True, True]
    assert found["env"].startswith("torch.")
    assert found["default"] == "gloo"
    assert found["ms"] < 5


def test_importing_torch_outlives_what_is_broken_around_ringcomm(tmp_path):
    """A setting that is misspelt, an MPI that cannot be loaded, a rank that is none."""
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so is not there')\n")
    path = os.pathsep.join([str(tmp_path), str(LATE_IMPORTS)])
    env = {"PYTHONPATH": path, "RINGCOMM_CYCEL": "1", "RANK": "x"}
    assert run("import torch; print(torch.ones(1).item())", tmp_path, env).strip() == "1.0"


def test_a_torch_that_takes_no_backend_is_a_line_in_the_log(monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise TypeError("another signature")

    monkeypatch.delattr(dist.Backend, "RINGCOMM")
    monkeypatch.setattr(dist.Backend, "register_backend", refuse)
    with caplog.at_level(logging.WARNING, "ringcomm"):
        discovery.register_quietly()
    assert 'does not know the backend "ringcomm" (TypeError: another signature)' in caplog.text
    with pytest.raises(TypeError):
        discovery.register()


@pytest.mark.parametrize("group", ["torch.backends", "torch.distributed.backends"])
def test_the_package_says_where_torch_looks(group):
    (found,) = (each for each in entry_points(group=group) if each.name == "ringcomm")
    found.load()()
    assert dist.Backend.RINGCOMM == "ringcomm"


@pytest.mark.parametrize(
    ("version", "has_distributed", "text"),
    [
        ("2.5.1+cpu", True, r"needs torch 2\.6 or newer, and this is 2\.5\.1\+cpu: pip install"),
        ("2.13.0", False, r"needs torch.distributed, but this torch \(2\.13\.0\)"),
    ],
)
def test_a_torch_that_cannot_be_served_is_an_error_that_says_so(version, has_distributed, text):
    with pytest.raises(ConfigError, match=text):
        checked_version(version, has_distributed=has_distributed)


def test_versions_from_2_6_on_are_served():
    assert checked_version("2.6.0", has_distributed=True) == (2, 6)
    assert checked_version("2.15.0a0+git12", has_distributed=True) == (2, 15)


@pytest.mark.at_length
def test_the_import_says_that_a_torch_is_too_old(tmp_path):
    old = "import torch; torch.__version__ = '2.5.1'\n"
    catch = "try: import ringcomm.torch\nexcept RuntimeError as error: print(error)"
    assert "needs torch 2.6 or newer, and this is 2.5.1" in run(old + catch, tmp_path)
