"""What one rank cannot set up, no rank uses: all of them go on to the next transport together."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import begin
from harness import outcomes

import ringcomm as rc
from ringcomm.config import Settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor import transport_setup as gpu_founding
from ringcomm.gpu.executor.engine_gpus import Drivers, Gpus

SIZE = 3
EVERY_GPU = [f"gpu-{rank}" for rank in range(SIZE)]


class Refused(Exception):
    """What CUDA says, in its own words."""


def refuse(*_, **__):
    raise Refused("not here")


def summed_beside(fault, folder, *, forced="auto", **options):
    """Return what each rank's allreduce gives and how it went, or what it raises."""
    gpus = []

    def body(rank):
        gpu = begin(rank, folder, **options)
        gpus.append(gpu)
        fault(rank, gpu)
        total = rc.allreduce(sim.array(np.full(100, rank + 1.0)))
        again = rc.allreduce(total)
        return again.get(), str(rc.explain(100, device="cuda"))

    def main(rank):
        try:
            return body(rank)
        except rc.ConfigError as error:
            assert rc.allreduce(np.ones(1))[0] == SIZE  # nothing is broken
            return error

    try:
        return outcomes(SIZE, main, settings=Settings(timeout_s=120, gpu_transport=forced))
    finally:
        for gpu in gpus:
            gpu.close()


def cannot_map(gpu):
    gpu.map = refuse


def cannot_register_flags(gpu):
    register, calls = gpu.register, []

    def later(memory):
        calls.append(memory)
        is_flags = len(calls) == 2  # the first memory is for marks
        return refuse() if is_flags else register(memory)

    gpu.register = later


def cannot_export(gpu):
    gpu.export = refuse


@pytest.mark.parametrize("culprit", [0, 2])
@pytest.mark.parametrize("problem", [cannot_map, cannot_register_flags, cannot_export])
def test_a_rank_whose_gpu_refuses_takes_all_to_host_memory(problem, culprit, tmp_path):
    def fault(rank, gpu):
        if rank == culprit:
            problem(gpu)

    for total, explained in summed_beside(fault, tmp_path):
        assert (total == 18).all()
        assert explained.startswith("arrays on GPUs: staged")
        assert f"ipc: no, rank {culprit}: Refused: not here" in explained


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_handle_that_maps_other_memory_is_noticed_before_any_array_is_read(culprit, tmp_path):
    def fault(rank, gpu):
        if rank == culprit:
            own = gpu.regions.take(1, None)
            gpu.map = lambda _: own.address

    for total, explained in summed_beside(fault, tmp_path):
        assert (total == 18).all()
        assert explained.startswith("arrays on GPUs: staged")
        neighbour = (culprit + 1) % SIZE
        assert f"CUDA IPC maps other memory than that of rank {neighbour} of" in explained
        assert f"instead of {0x52430000 + neighbour:#x}" in explained


def test_memory_that_the_first_rank_does_not_get_is_told_to_all(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_founding, "whole_pages", refuse)
    for total, explained in summed_beside(lambda rank, gpu: None, tmp_path):
        assert (total == 18).all()
        assert "ipc: no, rank 0: Refused: not here" in explained


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("call", ["unique_id", "connect"])
def test_without_nccl_on_one_rank_all_map_each_others_memory(call, culprit, tmp_path):
    def fault(rank, gpu):
        provider = Gpus.of(engine()).provider
        join = provider.connect

        def connect(*arguments):
            join(*arguments)  # the others are not left alone with it
            refuse()

        if rank == culprit:
            object.__setattr__(provider, call, connect if call == "connect" else refuse)

    results = summed_beside(fault, tmp_path, transport="nccl", reaches=EVERY_GPU)
    is_asked = call == "connect" or culprit == 0
    for total, explained in results:
        assert (total == 18).all()
        assert explained.startswith(f"arrays on GPUs: {'ipc' if is_asked else 'nccl'}")
        assert (f"nccl: no, rank {culprit}: Refused: not here" in explained) == is_asked


def test_a_binding_of_nccl_that_breaks_on_one_rank_is_told_to_all(tmp_path):
    def fault(rank, gpu):
        if rank == 1:
            Gpus.use(engine(), Drivers(sim.SimulatedGpu.all.__getitem__, refuse))

    for total, explained in summed_beside(fault, tmp_path, transport="nccl", reaches=EVERY_GPU):
        assert (total == 18).all()
        assert explained.startswith("arrays on GPUs: ipc")
        assert "nccl: no, rank 1: Refused: not here" in explained


def test_the_last_of_several_problems_leaves_host_memory(tmp_path):
    def fault(rank, gpu):
        object.__setattr__(Gpus.of(engine()).provider, "unique_id", refuse)
        if rank == 1:
            cannot_map(gpu)

    for total, explained in summed_beside(fault, tmp_path, transport="nccl", reaches=EVERY_GPU):
        assert (total == 18).all()
        assert explained.startswith("arrays on GPUs: staged")
        assert "nccl: no, rank 0: Refused" in explained
        assert "ipc: no, rank 1: Refused" in explained


def test_what_is_wanted_and_cannot_be_is_an_error_on_all_and_breaks_nothing(tmp_path):
    def fault(rank, gpu):
        if rank == 1:
            cannot_map(gpu)

    wanted = "RINGCOMM_GPU_TRANSPORT is ipc, which cannot be used: rank 1: Refused: not here"
    for error in summed_beside(fault, tmp_path, forced="ipc"):
        assert isinstance(error, rc.ConfigError)
        assert wanted in str(error)


def test_what_ends_the_job_meanwhile_is_no_reason_for_another_transport(tmp_path):
    """A death in the middle of the set-up is a death, and not a transport that does not fit."""

    def fault(rank, gpu):
        def die(*_):
            raise KeyboardInterrupt

        if rank == 1:
            gpu.map = die

    first, dead, third = summed_beside(fault, tmp_path)
    assert isinstance(dead, KeyboardInterrupt)
    for each in (first, third):
        assert isinstance(each, rc.PeerFailedError)
        assert "rank 1" in str(each)
        assert "KeyboardInterrupt" in str(each)


def test_the_end_waits_for_a_team_that_is_about_to_be_closed(monkeypatch):
    """Its thread may have begun a moment before: memory that it uses goes last."""
    ended, may_end, enders = [], threading.Event(), []

    def close(*, is_clean):
        assert may_end.wait(60)
        ended.append("team")

    engine = SimpleNamespace(extensions=SimpleNamespace(drop=lambda _: None))
    gpus = Gpus(engine, None)
    gpus._teams[1] = SimpleNamespace(close=close)
    gpus._memories[0] = SimpleNamespace(close=lambda **_: ended.append("memory"))
    start = threading.Thread.start

    def start_beside_the_end(thread):
        start(thread)
        enders.append(threading.Thread(target=gpus.close, kwargs={"is_clean": True}))
        start(enders[0])
        enders[0].join(0.2)  # if it did not wait, it would be over
        may_end.set()

    monkeypatch.setattr(threading.Thread, "start", start_beside_the_end)
    gpus._close_team(1)
    enders[0].join(60)
    assert ended == ["team", "memory"]
