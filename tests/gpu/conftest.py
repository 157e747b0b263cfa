"""Ranks here share the memory of their node, and the kernels that are compiled for the CPU."""

import os

import gpu_emulation
import pytest


@pytest.fixture(autouse=True)
def _shared_memory(monkeypatch):
    monkeypatch.setattr("harness.wire", "node")


@pytest.fixture(autouse=True, scope="session")
def _shared_kernels(tmp_path_factory):
    os.environ[gpu_emulation.SHARED] = str(tmp_path_factory.mktemp("kernels"))
