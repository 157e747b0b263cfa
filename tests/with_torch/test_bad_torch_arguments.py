"""Whatever is passed to hvd's functions: a clear error or a result, and all ranks go on."""

import warnings

import pytest
import torch
from bad_values import VALUES, cases_of, come_to, n_begun, public, require_engine
from harness import at_length, run_ranks

import ringcomm as rc
import ringcomm.torch as hvd

pytestmark = pytest.mark.usefixtures("own_folder")  # for timelines
SIZE = 2
TENSORS = {
    "meta": lambda: torch.empty(2, 3, device="meta"),
    "sparse": lambda: torch.ones(2, 3).to_sparse(),
    "expanded": lambda: torch.ones(1).expand(2, 3),
    "complex": lambda: torch.ones(2, 3, dtype=torch.complex64),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8),
    "no elements": lambda: torch.empty(0),
    "nan": lambda: torch.full((2, 3), float("nan")),
    "wanting a gradient": lambda: torch.ones(2, 3, requires_grad=True),
}
MORE = VALUES | {f"tensor: {name}": make for name, make in TENSORS.items()}
del MORE["endless"]  # this face makes a list of what it is given, as Horovod does


def one(_rank):
    return {"tensor": torch.arange(6.0).reshape(2, 3)}


def several(_rank):
    return {"tensors": [torch.arange(6.0), torch.ones(2, 3)]}


def from_root(rank):
    return one(rank) | {"root_rank": 1}


# What each function is called with where it is called as it should be.
GOOD = {
    "add_process_set": lambda _: {"process_set": [0]},
    "allgather": one,
    "allgather_async": one,
    "allgather_object": lambda rank: {"obj": rank},
    "allreduce": one,
    "allreduce_": one,
    "allreduce_async": one,
    "allreduce_async_": one,
    "alltoall": one,
    "alltoall_async": one,
    "average_metrics": lambda rank: {"metrics": {"loss": float(rank)}},
    "barrier": lambda _: {},
    "broadcast": from_root,
    "broadcast_": from_root,
    "broadcast_async": from_root,
    "broadcast_async_": from_root,
    "broadcast_object": lambda rank: {"obj": rank, "root_rank": 1},
    "broadcast_optimizer_state": lambda _: {"optimizer": optimizer(), "root_rank": 1},
    "broadcast_parameters": lambda _: {
        "params": torch.nn.Linear(2, 2).state_dict(),
        "root_rank": 1,
    },
    "DistributedOptimizer": lambda _: {"optimizer": optimizer()},
    "grouped_allgather": several,
    "grouped_allgather_async": several,
    "grouped_allreduce": several,
    "grouped_allreduce_": several,
    "grouped_allreduce_async": several,
    "grouped_allreduce_async_": several,
    "grouped_reducescatter": several,
    "grouped_reducescatter_async": several,
    "poll": lambda _: {"handle": hvd.allreduce_async(torch.ones(1))},
    "process_set_by_id": lambda _: {"process_set_id": 0},
    "ProcessSet": lambda _: {"ranks_or_comm": [0]},
    "reducescatter": one,
    "reducescatter_async": one,
    "remove_process_set": lambda _: {"process_set": hvd.global_process_set},
    "scaled_lr": lambda _: {"lr": 0.1},
    "sparse_allreduce_async": lambda _: {"tensor": torch.ones(2, 3).to_sparse()},
    "start_timeline": lambda _: {"file_path": "trace"},
    "SyncBatchNorm": lambda _: {"num_features": 3},
    "synchronize": lambda _: {"handle": hvd.allreduce_async(torch.ones(1))},
}
APART = {
    "init", "shutdown", "run", "join", "init_process_group", "stop_timeline",  # begin or end
    "Checkpoint", "GradScaler", "Metrics", "node_hook", "Restored", "Compression",
    "WarmupLR",  # objects
    "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous",
    "is_initialized", "ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled",
    "mpi_built", "mpi_enabled", "mpi_threads_supported", "nccl_built", "rocm_built",
    "get_process_set_ids_and_ranks",  # no arguments
}  # fmt: skip
# Several operations, or none: one rank's mistake is not for the others to hear of.
ALONE = {
    "add_process_set", "broadcast_optimizer_state", "broadcast_parameters",
    "DistributedOptimizer", "poll", "process_set_by_id", "ProcessSet", "remove_process_set",
    "scaled_lr", "start_timeline", "synchronize", "SyncBatchNorm",
}  # fmt: skip
BROKE = {"numbers", "hostile"}


def optimizer():
    return torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)


def attempt(function, rank, /, **bad):
    """Call a function, and wait for its handle; return its error, or None."""

    def call(**options):
        result = getattr(hvd, function)(**options)
        return hvd.synchronize(result) if hasattr(result, "done") else result

    try:
        return come_to(call, GOOD[function](rank) | bad)
    except RuntimeError as error:  # torch's own
        return error


@pytest.fixture(autouse=True)
def without_warnings():
    """Let average= pass, which is Horovod's older way."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_no_function_is_forgotten():
    assert public(hvd) == GOOD.keys() | APART


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize("wire", at_length(["messages", "node"], ["messages"]), indirect=True)
def test_a_bad_argument_on_all_ranks_is_refused_or_served(name, wire):
    def body(rank):
        for parameter, value in cases_of(getattr(hvd, name), BROKE, MORE):
            attempt(name, rank, **{parameter: MORE[value]()})
            require_engine(rank, SIZE, f"{name}({parameter}={value})")

    run_ranks(SIZE, body)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("splits", [[1.5], ["a"], [-1], [7]], ids=str)
@pytest.mark.parametrize("wire", ["messages", "node"], indirect=True)
def test_ranks_whose_own_splits_are_wrong_get_their_own_error(splits, size, wire):
    """Whatever their values: nobody else need know that these are wrong."""

    def body(rank):
        mine = [n * (rank + 1) for n in splits] * size
        with pytest.raises((TypeError, ValueError)) as caught:
            hvd.alltoall(torch.ones(size, 2), mine)
        assert str(mine) in str(caught.value)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(size, body) == [size] * size


@pytest.mark.parametrize("name", sorted(GOOD.keys() - ALONE))
@pytest.mark.parametrize("wire", at_length(["messages", "node"], ["node"]), indirect=True)
def test_a_bad_argument_on_one_rank_is_told_to_the_others_or_can_be_mended(name, wire):
    def body(rank):
        hvd.barrier()  # process sets are made by now
        for parameter, value in cases_of(getattr(hvd, name), BROKE, MORE):
            if parameter == "name" and isinstance(MORE[value](), str):
                continue  # another operation, which waits for one of that name
            n_before, error = n_begun(), None
            if rank == 1:
                error = attempt(name, rank, **{parameter: MORE[value]()})
            label = f"{name}({parameter}={value}): {error!r}"
            if rank == 0 or n_begun() == n_before:
                attempt(name, rank)
            elif error is not None:
                assert isinstance(error, rc.MismatchError), label
            require_engine(rank, SIZE, label)

    run_ranks(SIZE, body)
