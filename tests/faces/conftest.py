import pytest


@pytest.fixture
def odd_cuts(monkeypatch):
    """Cut tables of optimizers where no tensor ends, and let some tensors be alone."""
    from ringcomm.torch.ps import buckets

    monkeypatch.setattr(buckets, "BLOCK_NBYTES", 700)  # 87 float64
    monkeypatch.setattr(buckets, "ALONE_NBYTES", 600)
    monkeypatch.setattr(buckets, "FUSED_NBYTES", 1200)
