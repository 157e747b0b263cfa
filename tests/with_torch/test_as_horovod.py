"""Scripts that import horovod.torch run unchanged."""

import sys

import pytest
from harness import IS_MPICH, run_command, run_job, run_script

SCRIPT = """
import sys
import torch
import horovod
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.torch.compression import Compression
from horovod.torch.mpi_ops import Average, allreduce

hvd.init()
assert callable(horovod.run) and issubclass(hvd.SyncBatchNorm, torch.nn.Module)
assert hvd.mpi_built() and not hvd.gloo_built() and not hvd.nccl_built()
assert hvd.is_homogeneous() and hvd.local_size() == hvd.size()
model = torch.nn.Linear(3, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=Compression.fp16, op=Average
)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 3) * hvd.rank()).sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
try:
    hvd.allreduce(torch.ones(1 + hvd.rank()), name="wrong")
except HorovodInternalError as error:
    print("agreed:", error)
total = allreduce(torch.tensor([1.0]), op=hvd.Sum).item()
last = hvd.join()
print("total", total, "arguments", sys.argv[1:], "version", horovod.__version__, "last", last >= 0)
hvd.shutdown()
"""
# After which the script begins anew, as one program.
PROCESS_SETS = """
import torch
import horovod.torch as hvd
from mpi4py import MPI
halves = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank % 2)
first, mine = hvd.ProcessSet([0]), hvd.ProcessSet(halves)
hvd.init(comm=MPI.COMM_WORLD, process_sets=[first, mine])
rank, known = hvd.rank(), {0: [0, 1, 2], 1: [0], 2: [0, 2], 3: [1]}
assert hvd.get_process_set_ids_and_ranks() == known
assert isinstance(mine.mpi_comm, MPI.Comm) and hvd.global_process_set.mpi_comm is MPI.COMM_WORLD
assert (mine.process_set_id, mine.ranks) == ((3, [1]) if rank == 1 else (2, [0, 2]))
of_one, again = MPI.COMM_WORLD.Split(rank), MPI.COMM_WORLD.Split(rank % 2)
for comm, number in ((MPI.COMM_WORLD, 0), (of_one, 1), (again, 2)):
    try:
        hvd.add_process_set(hvd.ProcessSet(comm))
        raise SystemExit("a process set has these ranks")
    except ValueError as error:
        assert f"process_set_id={number}" in str(error)
assert hvd.get_process_set_ids_and_ranks() == known
assert isinstance(mine.mpi_comm, MPI.Comm) and hvd.global_process_set.mpi_comm is MPI.COMM_WORLD
hvd.remove_process_set(hvd.process_set_by_id(1))
parts = hvd.add_process_set(hvd.ProcessSet(MPI.COMM_WORLD.Split(int(rank == 0))))
assert (parts.process_set_id, parts.ranks) == ((4, [0]) if rank == 0 else (5, [1, 2]))
for each in (mine, parts):
    hvd.broadcast(torch.zeros(1), each.ranks[0], process_set=each)
    print("sum", hvd.allreduce(torch.tensor([rank + 1]), op=hvd.Sum, process_set=each).item())
hvd.shutdown()
"""


def test_a_script_runs_under_the_alias_and_process_sets_come_from_communicators_at_init(tmp_path):
    (tmp_path / "train.py").write_text(PROCESS_SETS + SCRIPT)
    job = run_job(3, "-m", "ringcomm.torch.as_horovod", "train.py", "--epochs", "3", cwd=tmp_path)
    assert job.code == 0, job.output
    sums = sorted(line for line in job.output.splitlines() if line.startswith("sum"))
    assert sums == [f"sum {n}" for n in (1, 2, 4, 4, 5, 5)]
    assert job.output.count("total 3.0 arguments ['--epochs', '3'] version 0.28.1 last True") == 3
    assert job.output.count("agreed: allreduce[wrong]: rank 0 sent float32 (1,)") == 3


@pytest.mark.at_length
def test_a_module_beside_the_script_is_found_and_m_runs_a_module(tmp_path):
    (tmp_path / "net.py").write_text("width = 5\n")
    (tmp_path / "main.py").write_text(
        "import net, horovod.torch as hvd\nhvd.init()\nprint('width', net.width, hvd.size())\n"
    )
    for way in (["main.py"], ["-m", "main"]):
        job = run_job(1, "-m", "ringcomm.torch.as_horovod", *way, cwd=tmp_path)
        assert job.code == 0, job.output
        assert "width 5 1" in job.output


@pytest.mark.at_length
def test_installed_from_within_a_script(tmp_path):
    text = """
        from ringcomm.torch.as_horovod import install
        install()
        install()
        import horovod.torch as hvd
        import ringcomm.torch
        assert hvd.allreduce is ringcomm.torch.allreduce
        print("fine")
    """
    job = run_script(1, "\n".join(line.strip() for line in text.splitlines()), cwd=tmp_path)
    assert job.code == 0, job.output
    assert "fine" in job.output


@pytest.mark.at_length
def test_a_horovod_that_is_loaded_already_is_not_replaced(tmp_path):
    (tmp_path / "horovod.py").write_text("")
    text = "import horovod; from ringcomm.torch.as_horovod import install; install()"
    done = run_command([sys.executable, "-c", text], cwd=tmp_path)
    assert done.returncode == 1
    assert "before that" in done.stderr


@pytest.mark.at_length
@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0), (["-m"], 2)])
def test_usage(arguments, code):
    done = run_command([sys.executable, "-m", "ringcomm.torch.as_horovod", *arguments])
    assert done.returncode == code
    assert "usage: python -m ringcomm.torch.as_horovod" in done.stdout + done.stderr


MODULES = """
import sys
import pytest, torch
from ringcomm.torch.as_horovod import install
install()
import horovod, horovod.torch as hvd
from horovod.common import elastic as common_elastic
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.exceptions import HorovodVersionMismatchError
from horovod.common.util import check_extension, extension_available, gpu_available, env
from horovod.common.util import check_installed_version, is_version_greater_equal_than
from horovod.common.util import is_iterable, mpi_built, num_rank_is_power_2, nccl_built, split_list
from horovod.runner import run
from horovod.torch import mpi_ops as ops
from horovod.torch.compression import Compressor
from horovod.torch.elastic import ElasticSampler, TorchState
from horovod.torch.elastic.sampler import ElasticSampler as sampler
from horovod.torch.elastic.state import TorchState as state
"""


@pytest.mark.at_length
def test_modules_that_scripts_import_from_are_there(tmp_path):
    text = """
import os
assert horovod.run is run and sampler is ElasticSampler and state is TorchState
assert issubclass(HostsUpdatedInterrupt, RuntimeError) and HostsUpdatedInterrupt(True).skip_sync
assert not HostsUpdatedInterrupt().skip_sync and issubclass(HorovodVersionMismatchError, Exception)
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
with pytest.raises(ImportError, match="horovod.torch alone"):
    check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", __file__)
assert extension_available("torch") and not extension_available("mxnet", verbose=True)
assert mpi_built(verbose=True) and not nccl_built() and not gpu_available("torch")
assert [n for n in range(9) if num_rank_is_power_2(n)] == [1, 2, 4, 8]
assert split_list([1, 2, 3, 4, 5], 3) == [[1, 2], [3, 4], [5]]
assert is_iterable([]) and not is_iterable(3)
check_installed_version("pytorch", "0.4.0")
assert is_version_greater_equal_than("1.13.0+cu117", "1.9.0")
assert not is_version_greater_equal_than("1.9.1", "1.13.0")
hvd.check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")

class Own(Compressor):
    @staticmethod
    def compress(x):
        return x.half(), x.dtype
    @staticmethod
    def decompress(x, ctx):
        return x.to(ctx)

hvd.init()
assert hvd.allreduce(torch.tensor([2.5]), compression=Own).tolist() == [2.5]
x, everybody = torch.ones(2, requires_grad=True), hvd.global_process_set
results = [
    ops.HorovodAllreduce.apply(x, None, "a", hvd.Sum, 2.0, 3.0, everybody),
    *ops.HorovodGroupedAllreduce.apply(None, "b", hvd.Sum, 2.0, 3.0, everybody, x, x),
    ops.HorovodAllgather.apply(x, "c", everybody),
    *ops.HorovodGroupedAllgather.apply("d", everybody, x, x),
    ops.HorovodBroadcast.apply(x, 0, "e", everybody),
    ops.HorovodAlltoall.apply(x, None, "f", everybody),
    ops.HorovodReducescatter.apply(x, "g", hvd.Sum, everybody, 2.0, 3.0),
    *ops.HorovodGroupedReducescatter.apply("h", hvd.Sum, everybody, 2.0, 3.0, x, x),
]
assert [r.tolist() for r in results] == [[n, n] for n in (6, 6, 6, 1, 1, 1, 1, 1, 6, 6, 6)]
sum(results).sum().backward()
assert x.grad.tolist() == [6 * 6 + 5] * 2
with env(HOME="/nowhere", NEW="1", PATH=None):
    assert "PATH" in os.environ
    assert os.environ["HOME"] == "/nowhere" and os.environ["NEW"] == "1"
assert os.environ["HOME"] != "/nowhere" and "NEW" not in os.environ
print("fine")
"""
    job = run_script(1, MODULES + text, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "fine" in job.output


@pytest.mark.at_length
def test_elastic_training_has_horovods_names(tmp_path):
    text = r"""
@hvd.elastic.run
def train(state, epochs):
    "Trains."

class MyState(hvd.elastic.TorchState):
    pass

assert train.__name__ == "train" and train.__doc__ == "Trains."
hvd.init()
sampler = ElasticSampler(range(10), shuffle=False)
state = MyState(model=torch.nn.Linear(1, 1), batch=0, sampler=sampler)
state.commit()
assert isinstance(state, common_elastic.ObjectState) and isinstance(state, common_elastic.State)
assert (sampler.num_replicas, sampler.rank, sampler.num_samples, len(sampler)) == (1, 0, 10, 10)
assert list(sampler) == sampler.indices == sampler.get_indices(0, 100) == list(range(10))
sampler.record_batch(1, 4)
sampler.record_indices([0, 9])
assert sampler.processed_indices == {0, 4, 5, 6, 7, 9} and len(sampler) == 10
assert sampler.processed_num == 6
kept = sampler.state_dict()
assert kept == {"epoch": 0, "processed_indices": {0, 4, 5, 6, 7, 9}}
state.restore()
assert sampler.processed_indices == set()
sampler.load_state_dict(kept)
assert list(sampler) == sampler.remaining_indices == [1, 2, 3, 8] and sampler.total_size == 4
sampler.record_batch(0, 3)
sampler.reset()
assert list(sampler) == [8]
sampler.set_epoch(1)
assert (sampler.epoch, len(sampler), sampler.processed_indices) == (1, 10, set())
assert sampler.processed_num == 0
shuffled = ElasticSampler(range(10), seed=2)
assert sorted(shuffled) == list(range(10)) != list(shuffled)
state.model = torch.nn.Linear(2, 2)  # a commit copies what is there now
state.commit()
before = state.model.weight.detach().clone()
state.model.weight.data.zero_()
state.restore()
assert torch.equal(state.model.weight, before)
again = []
trained = common_elastic.run_fn(lambda state: again.append(state.batch), reset=None)(state)
assert again == [0] and trained is None
state.batch = 1
state.commit()
state.batch = 2
state.restore()
assert state.batch == 1
with pytest.raises(TypeError, match="the first argument is a State, not None"):
    train(None, epochs=3)
print("fine")
"""
    job = run_script(1, MODULES + text, cwd=tmp_path)
    assert job.code == 0, job.output
    assert "fine" in job.output


@pytest.mark.at_length
def test_run_takes_what_horovods_run_takes(tmp_path):
    text = """
import sys
import pytest
import horovod
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError

def rank_plus(x, y=0, kind=HorovodInternalError):
    hvd.init()
    assert kind is HorovodInternalError
    return hvd.rank() + x + y

if __name__ == "__main__":
    results = horovod.run(rank_plus, (10,), {"y": 5}, 2, hosts="localhost:2", verbose=False,
                          use_mpi=True, mpi_args="OPTIONS")
    assert results == [15, 16], results
    assert horovod.run(rank_plus, (1,), num_proc=2, np=1) == [1]
    for options in ({"hosts": "a:2,b:2"}, {"use_gloo": True}, {"network_interfaces": "eth0"}):
        with pytest.raises(ValueError, match="no counterpart"):
            horovod.run(rank_plus, (1,), np=1, **options)
    print("fine")
"""
    text = text.replace("OPTIONS", "" if IS_MPICH else "--oversubscribe")
    (tmp_path / "program.py").write_text(text)
    done = run_command(
        [sys.executable, "-m", "ringcomm.torch.as_horovod", "program.py"], cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fine" in done.stdout
