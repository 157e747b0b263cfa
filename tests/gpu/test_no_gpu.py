"""Where no GPU can be used, rc.zeros and rc.explain say why, and touch no array library."""

import dataclasses
import sys
import types

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import begin
from harness import run_ranks

import ringcomm as rc
from ringcomm import arrays
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.errors import ConfigError
from ringcomm.gpu.executor.engine_gpus import Gpus
from ringcomm.nvidia import find_software
from ringcomm.nvidia.judge_software import Cupy, Driver, Nccl, Stack

NO_CUPY = Stack()
CUPY_ALONE = Stack(cupy=Cupy(version="14.2.0", cuda=13020, nvrtc="13.0", has_headers=True))
GAPS = [
    (NO_CUPY, "a GPU array needs cupy: pip install 'ringcomm[cuda13]'"),
    (
        CUPY_ALONE,
        "no NVIDIA driver (libcuda.so.1) is here: install one, or start the container with "
        "--gpus all",
    ),
]


@pytest.fixture
def found(monkeypatch):
    """Return a function that lets the process find this stack, and no array library at all."""

    def find(stack):
        monkeypatch.setattr(arrays, "_added", [])
        monkeypatch.setattr(find_software, "probe", lambda: stack)
        monkeypatch.setattr(arrays, "_cupy", lambda: pytest.fail("cupy was touched"))

    return find


@pytest.mark.parametrize("make", [rc.empty, rc.zeros])
@pytest.mark.parametrize(("stack", "line"), GAPS, ids=["no cupy", "no driver"])
def test_a_registered_array_is_refused_with_what_is_missing(stack, line, make, found):
    found(stack)

    def body(_):
        with pytest.raises(ConfigError) as refused:
            make(4, "float32", device="cuda")
        return str(refused.value)

    assert run_ranks(2, body) == [line, line]


@pytest.mark.parametrize(("stack", "line"), GAPS, ids=["no cupy", "no driver"])
def test_explain_promises_no_transport(stack, line, found):
    found(stack)
    told = run_ranks(1, lambda _: str(rc.explain(1000, device="cuda")))
    assert told == [f"arrays on GPUs: this rank can use no GPU; {line}"]


def test_where_a_gpu_can_be_used_explain_says_what_will_choose(monkeypatch, found):
    found(NO_CUPY)
    monkeypatch.setattr(find_software, "probe", lambda: WITHOUT_NCCL)
    (told,) = run_ranks(1, lambda _: str(rc.explain(1000, device="cuda")))
    assert told.endswith("first operation on them takes the first usable of nccl, ipc and staged")


DRIVER = Driver(is_loaded=True, cuda=13000, gpus=(object(),))
WITHOUT_NCCL = dataclasses.replace(CUPY_ALONE, driver=DRIVER)
WITH_NCCL = dataclasses.replace(WITHOUT_NCCL, nccl=Nccl(version=22803))


@pytest.mark.parametrize(
    ("stack", "nccl", "has_cuda"),
    [
        (NO_CUPY, 0, False),
        (dataclasses.replace(WITH_NCCL, driver=Driver()), 0, False),
        (WITHOUT_NCCL, 0, True),
        (dataclasses.replace(WITH_NCCL, nccl=Nccl(version=22005)), 0, True),  # is too old
        (WITH_NCCL, 22803, True),
    ],
)
def test_horovods_questions_are_answered_by_what_can_be_used(
    stack, nccl, has_cuda, found, monkeypatch
):
    job = pytest.importorskip(
        "ringcomm.torch.horovod.basics", reason="the core is tested without torch, too"
    )
    found(stack)
    binding = types.ModuleType("cupy.cuda.nccl")
    binding.NcclError, binding.get_version = RuntimeError, lambda: stack.nccl.version
    cuda = types.ModuleType("cupy.cuda")
    cuda.nccl = binding
    for name, module in {"cupy": types.ModuleType("cupy"), "cupy.cuda": cuda}.items():
        monkeypatch.setitem(sys.modules, name, module)
    name = "ringcomm.gpu.transports.nccl_cupy"
    monkeypatch.setitem(sys.modules, name, None)
    del sys.modules[name]  # to be imported anew, and forgotten again after the test
    assert (job.nccl_built(), job.cuda_built()) == (nccl, has_cuda)
    assert type(job.nccl_built()) is int


def test_what_is_in_use_is_not_looked_for_again(tmp_path):
    def body(rank):
        gpu = begin(rank, tmp_path)
        asked = []
        drivers = dataclasses.replace(sim.drivers(), require=lambda: asked.append(1))
        Gpus.use(engine(), drivers)
        rc.allreduce(sim.array(np.ones(3)))
        for _ in range(2):
            rc.zeros(4, "float32", device="cuda")
        gpu.synchronize()
        gpu.close()
        return asked

    assert run_ranks(1, body) == [[]]


@pytest.mark.parametrize("call", [rc.zeros, rc.explain])
@pytest.mark.parametrize(
    ("device", "hint"),
    [
        (
            "cuda:1",
            ", the current GPU. Call torch.cuda.set_device(1) or cupy.cuda.Device(1).use() before",
        ),
        ("gpu", ""),
        (0, ""),
    ],
)
def test_a_device_that_is_none_is_refused_with_the_way_to_another_gpu(device, hint, call):
    def body(_):
        with pytest.raises(ValueError, match="device is") as refused:
            call(4, "float32", device=device)
        return str(refused.value)

    assert run_ranks(1, body) == [f'device is {device!r}; it must be "cpu" or "cuda"{hint}']
