"""The tests of this folder are skipped, with the reason, where torch is not installed."""

import importlib
import importlib.util
import sys

import harness
import pytest


def pytest_configure():
    """Let torch load what is used of it, as in the ranks of jobs: the rest takes 5 s of a core."""
    if not harness.is_at_length() and "torch" not in sys.modules:
        sys.path.append(str(harness.LATE_IMPORTS))
        importlib.import_module("sitecustomize")


class WithoutTorch(pytest.Module):
    def collect(self):
        pytest.skip("the core is tested without torch, too", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("torch") is None:
        return WithoutTorch.from_parent(parent, path=module_path)
    return None


@pytest.fixture
def odd_cuts(monkeypatch):
    """Cut tables of optimizers where no tensor ends, and let some tensors be alone."""
    from ringcomm.torch.ps import buckets

    monkeypatch.setattr(buckets, "BLOCK_NBYTES", 700)  # 87 float64
    monkeypatch.setattr(buckets, "ALONE_NBYTES", 600)
    monkeypatch.setattr(buckets, "FUSED_NBYTES", 1200)
