"""Folders that the rest of the package does without."""

import os
import sys
from pathlib import Path

import pytest
from harness import job_environment, run_command, run_script

import ringcomm

LEFT_OUT = ("gpu", "ps", "torch/distributed", "torch/ps", "torch/zero")
SCRIPT = """
import sys, ringcomm, torch, ringcomm.torch as hvd
hvd.init()
model = torch.nn.Linear(5, 3)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_optimizer_state(optimizer)
with torch.no_grad():
    model.weight.fill_(hvd.rank())
model(torch.ones(2, 5) * (hvd.rank() + 1)).sum().backward()
assert model.weight.grad[0, 0] == 3.0, model.weight.grad
optimizer.step()
hvd.Checkpoint("saved").save(1, model=model, optimizer=optimizer)
left_out = ("ringcomm.gpu", "ringcomm.ps", "ringcomm.torch.zero")
assert not [name for name in sys.modules if name.startswith(left_out)]
assert not hvd.cuda_built() and not hvd.nccl_built()
try:
    ringcomm.zeros(3, "float32", device="cuda")
except ringcomm.ConfigError as error:
    refused = str(error)
assert "need ringcomm.gpu" in refused
print("trained", sys.modules["ringcomm"].__file__)
"""


def test_trains_without_the_folders_that_can_be_left_out(tmp_path):
    whole, rest = Path(ringcomm.__file__).parent, tmp_path / "ringcomm"
    _link_all_but(LEFT_OUT, whole, rest)
    late = job_environment().get("PYTHONPATH", str(tmp_path))
    path = os.pathsep.join([late, str(tmp_path), *sys.path])
    job = run_script(2, SCRIPT, cwd=tmp_path, env={"PYTHONPATH": path})
    assert job.code == 0, job.output
    assert job.output.count(f"trained {rest}") == 2


@pytest.mark.at_length
def test_the_unit_tests_need_no_gpu_folder(tmp_path):
    _link_all_but(("gpu",), Path(ringcomm.__file__).parent, tmp_path / "ringcomm")
    root = Path(__file__).parents[2]
    unit = root / "tests" / "unit"
    where = ("-c", root / "pyproject.toml", "--rootdir", root)
    others = ("-q", "-pno:cacheprovider", "--ignore", unit / "test_routes.py")  # has those of gpu
    done = run_command(
        [sys.executable, "-m", "pytest", *where, *others, unit],
        env={**os.environ, "AT_LENGTH": "", "FAST": "1", "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:]


def _link_all_but(left_out, whole, part):
    """Make a folder of links to what is in another one, but for some folders."""
    part.mkdir()
    for each in whole.iterdir():
        inner = [name.partition("/")[2] for name in left_out if name.startswith(f"{each.name}/")]
        if inner:
            _link_all_but(inner, each, part / each.name)
        elif each.name not in {*left_out, "__pycache__"}:
            (part / each.name).symlink_to(each)
