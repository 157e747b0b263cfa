"""The tests of this folder are skipped, with the reason, where torch is not installed."""

import importlib.util

import pytest
from harness import load_little_of_torch


def pytest_configure():
    load_little_of_torch()


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
