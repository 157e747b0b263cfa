"""NCCL through nccl4py: its low-level functions, with a stand-in that has their signatures.

What is there of nccl4py 0.6: nccl.bindings.nccl, functions of positional arguments.
"""

import copy
import ctypes
import functools
import sys
import types

import numpy as np
import pytest
import simulated_gpu as sim
from gpu_ranks import begin
from harness import run_ranks
from random_programs import make_program, run_program
from simulated_nccl import FakeNccl

import ringcomm as rc
from ringcomm.config import read_settings
from ringcomm.engine.api.init_rank_size import engine
from ringcomm.gpu.executor.gpus import Drivers, Gpus, cuda_drivers
from ringcomm.gpu.transports import nccl_nccl4py
from ringcomm.gpu.transports.nccl_nccl4py import Nccl4py
from ringcomm.nvidia import judge_software


class NCCLError(Exception):
    pass


class UniqueId:
    def __init__(self, name):
        self._raw = ctypes.create_string_buffer(name, 128)
        self.ptr = ctypes.addressof(self._raw)


class Bindings:
    """nccl.bindings.nccl over the stand-in for NCCL; signatures as its documentation has them."""

    NCCLError = NCCLError

    def __init__(self, fake):
        self._fake = fake

    def get_version(self):
        return 23203

    def get_unique_id(self):
        return UniqueId(self._fake.unique_id())

    def comm_init_rank_scalable(self, nranks, myrank, n_id, comm_ids, config):
        assert (n_id, len(comm_ids), config) == (1, 128, 0)
        name = bytes(comm_ids).rstrip(b"\0")
        self._comm = self._fake.connect(name, myrank, nranks)
        return self._comm

    def _call(self, name, n_arguments, *arguments):
        *rest, comm, stream = arguments
        assert len(rest) == n_arguments
        getattr(comm, name)(*rest, stream)

    # Ahead of the communicator and the stream: addresses, a count, a dtype, an operator, a rank.
    all_reduce = functools.partialmethod(_call, "all_reduce", 5)
    reduce = functools.partialmethod(_call, "reduce", 6)
    reduce_scatter = functools.partialmethod(_call, "reduce_scatter", 5)
    broadcast = functools.partialmethod(_call, "broadcast", 5)
    send = functools.partialmethod(_call, "send", 4)
    recv = functools.partialmethod(_call, "recv", 4)

    def group_start(self):
        self._comm.group_start()

    def group_end(self):
        self._comm.group_end()

    def comm_abort(self, comm):
        comm.comm_abort()

    def comm_destroy(self, comm):
        comm.comm_destroy()


class OneEach(Nccl4py):
    """Each communicator has functions of its own: those for groups do not tell whose they are."""

    def __init__(self, fake):
        super().__init__()
        self._fake = fake

    def unique_id(self):
        return Nccl4py.unique_id(self._fresh())

    def connect(self, unique_id, rank, size):
        return Nccl4py.connect(self._fresh(), unique_id, rank, size)

    def _fresh(self):
        fresh = copy.copy(self)
        fresh._nccl = Bindings(self._fake)
        return fresh


def installed(monkeypatch, bindings):
    """Let `from nccl.bindings import nccl` find this."""
    package = types.ModuleType("nccl.bindings")
    if bindings is not None:
        package.nccl = bindings
    monkeypatch.setitem(sys.modules, "nccl", types.ModuleType("nccl"))
    monkeypatch.setitem(sys.modules, "nccl.bindings", package)
    stack = judge_software.Stack(
        driver=judge_software.Driver(), cupy=judge_software.Cupy(version="14.2.0", cuda=13020)
    )
    monkeypatch.setattr(nccl_nccl4py, "probe", lambda: stack)


@pytest.mark.parametrize("seed", range(2))
def test_every_call_is_one_of_nccls(seed, tmp_path, monkeypatch):
    program = make_program(seed, 3)

    def body(rank):
        gpu = begin(rank, tmp_path, "nccl")
        try:
            provider = OneEach(FakeNccl(gpu, tmp_path))
            Gpus.use(engine(), Drivers(sim.SimulatedGpu.all.__getitem__, lambda: provider))
            run_program(program, rank, seed, sim.Simulated())
            total = rc.allreduce(sim.array(np.full(100, rank + 1.0, "f4")))
            told = str(rc.explain(400, device="cuda"))
            gpu.synchronize()
            return total.get()[0], told.splitlines()[0]
        finally:
            gpu.close()

    installed(monkeypatch, Bindings(None))
    for total, told in run_ranks(3, body):
        assert total == 6
        assert told.startswith("arrays on GPUs: nccl")


def test_what_nccl_refuses_is_told_with_its_words(monkeypatch):
    class Refusing(Bindings):
        def comm_init_rank_scalable(self, *_):
            raise NCCLError("UnhandledCudaError (1)")

    installed(monkeypatch, Refusing(None))
    with pytest.raises(rc.RingcommError, match="ncclCommInitRank failed: UnhandledCudaError"):
        Nccl4py().connect(b"x" * 128, 0, 1)


def test_where_it_is_not_installed_the_remedy_is_told(monkeypatch):
    installed(monkeypatch, None)
    with pytest.raises(
        rc.ConfigError, match="pip install nccl4py cuda-bindings, or set RINGCOMM_NCCL to cupy"
    ):
        cuda_drivers("nccl4py").provider()


def test_a_version_that_is_too_old_is_refused(monkeypatch):
    class Old(Bindings):
        def get_version(self):
            return 21800

    installed(monkeypatch, Old(None))
    with pytest.raises(rc.ConfigError, match=r"NCCL 2\.18\.0 is too old"):
        Nccl4py()


def test_the_setting_has_two_values():
    assert read_settings({"RINGCOMM_NCCL": "nccl4py"}).nccl == "nccl4py"
    with pytest.raises(rc.ConfigError, match="RINGCOMM_NCCL is 'torch'; it must be one of cupy,"):
        read_settings({"RINGCOMM_NCCL": "torch"})
