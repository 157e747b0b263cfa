"""Ranks here share the memory of their node, and the kernels that are compiled for the CPU."""

import gc
import os
import threading

import gpu_emulation
import pytest


@pytest.fixture(autouse=True)
def _shared_memory(monkeypatch):
    monkeypatch.setattr("harness.wire", "node")


@pytest.fixture(autouse=True, scope="session")
def _shared_kernels(tmp_path_factory):
    os.environ[gpu_emulation.SHARED] = str(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True, scope="module")
def _no_engines_left():
    """An engine that was not closed ends, with its thread that calls CUDA, as garbage."""
    yield
    for thread in threading.enumerate():
        if thread.name == "ringcomm-gpu-release":
            thread.join(10)  # it ends once the simulated GPU is closed
    gc.collect()
