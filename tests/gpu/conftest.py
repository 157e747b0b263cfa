"""Ranks here share the memory of their node, and the kernels that are compiled for the CPU."""

import gc
import os
import threading

import gpu_emulation
import pytest
from harness import load_little_of_torch, wait_until


def pytest_configure():
    load_little_of_torch()


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
    wait_until(_has_collected, "threads that call CUDA are left")


def _has_collected():
    """Return True if no such thread is left; those that release streams end with their GPUs.

    Other threads that are about to end may still hold an engine, so one look is not enough.
    """
    gc.collect()
    names = ("ringcomm-gpu-release", "ringcomm-gpu-launch")
    return not any(thread.name in names for thread in threading.enumerate())
