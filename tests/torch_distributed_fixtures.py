"""Fixtures of the suites of torch.distributed; a plugin of pytest."""

import pytest
import torch.distributed as dist

import ringcomm as rc


@pytest.fixture(scope="session", autouse=True)
def job():
    dist.init_process_group("ringcomm")
    yield
    dist.destroy_process_group()
    rc.shutdown()


@pytest.fixture(autouse=True)
def in_step():
    yield
    dist.barrier()


@pytest.fixture
def rank():
    return dist.get_rank()


@pytest.fixture
def size():
    return dist.get_world_size()


@pytest.fixture
def world():
    return dist.group.WORLD
