"""Whatever is passed, to whichever function: a clear error or a result, and all ranks go on."""

import itertools
from functools import partial

import numpy as np
import pytest
from bad_values import VALUES, cases_of, come_to, n_begun, public, require_engine
from harness import at_length, run_ranks

import ringcomm as rc
from ringcomm import data

pytestmark = pytest.mark.usefixtures("own_folder")  # for timelines
SIZE = 2


def reduction(_rank):
    return {"x": np.arange(6.0), "op": rc.SUM}


def rows(_rank):
    return {"x": np.arange(6.0).reshape(2, 3)}


def several(_rank):
    return {"xs": [np.arange(6.0), np.ones((2, 3))]}


# What each function is called with where it is called as it should be.
GOOD = {
    "allgather": rows,
    "allgather_object": lambda rank: {"obj": rank},
    "allreduce": reduction,
    "allreduce_": reduction,
    "alltoall": rows,
    "barrier": lambda _: {},
    "broadcast": rows,
    "broadcast_": rows,
    "broadcast_object": lambda rank: {"obj": rank},
    "empty": lambda _: {"shape": 3, "dtype": "float32"},
    "exscan": reduction,
    "explain": lambda _: {"nbytes": 1000},
    "gather": rows,
    "gather_object": lambda rank: {"obj": rank},
    "grouped_allgather": several,
    "grouped_allreduce": several,
    "grouped_allreduce_": several,
    "grouped_reduce_scatter": several,
    "Grid": lambda _: {"dims": [0, 1]},
    "Group": lambda _: {"ranks": [0, 1]},
    "log": lambda _: {"step": 3, "loss": 0.5},
    "note_event": lambda _: {"text": "epoch 2 begins"},
    "reduce": rows,
    "reduce_": rows,
    "reduce_scatter": rows,
    "reduce_scatter_": rows,
    "scan": reduction,
    "scatter": rows,
    "scatter_object": lambda rank: {"objs": [rank, "x"]},
    "sendrecv": lambda rank: {
        "x": np.ones(3), "dest": rank, "out": np.empty(3), "source": rank
    },
    "split": lambda rank: {"color": 1, "key": -rank},
    "start_timeline": lambda _: {"prefix": "trace"},
    "stop_timeline": lambda _: {},
    "wait_all": lambda _: {"handles": []},
    "zeros": lambda _: {"shape": 3, "dtype": "float32"},
}  # fmt: skip
GOOD |= {f"{name}_async": good for name, good in GOOD.items() if hasattr(rc, f"{name}_async")}
GOOD |= {f"{name[:-1]}_async_": GOOD[name] for name in GOOD if hasattr(rc, f"{name[:-1]}_async_")}
APART = {
    "init", "shutdown", "run", "join",  # begin or end something
    "send", "recv", "isend", "irecv", "send_object", "recv_object",  # need a partner
    "Handle", "Op",  # nobody makes one
    "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size",  # no arguments
    "is_initialized", "node_memory",
    "should_stop",  # no arguments
    "step",  # test_features_beside_their_neighbours.py
    "Params", "live", "on_checkpoint",  # test_program_parameters.py, mpi/test_ringcomm_ctl.py
    "log_to",  # keeps what it gets; tests/mpi/test_ringcomm_top.py calls it
}  # fmt: skip
BROKE = {"numbers", "hostile"}
NUMBERS = {"-1", "2**60", "2**63", "-2**70", "10**400", "0-d", "faithless"}
ALONE = {"Group", "sendrecv", "explain", "empty", "zeros", "start_timeline", "stop_timeline"}
ALONE |= {"log", "note_event", "wait_all"}


def test_no_function_is_forgotten():
    assert public(rc) == GOOD.keys() | APART


def is_another_call(name, parameter, value):
    """Return True for what is no mistake, but another call, which other ranks do not make."""
    if parameter == "name":
        return isinstance(VALUES[value](), str)
    return name == "sendrecv" and parameter != "group" and value in NUMBERS


@pytest.mark.parametrize("name", sorted(GOOD))
@pytest.mark.parametrize("wire", at_length(["messages", "node"], ["messages"]), indirect=True)
def test_a_bad_argument_on_all_ranks_is_refused_or_served(name, wire):
    function = getattr(rc, name)

    def body(rank):
        for parameter, value in cases_of(function, BROKE):
            if name == "sendrecv" and is_another_call(name, parameter, value):
                continue
            come_to(function, GOOD[name](rank) | {parameter: VALUES[value]()})
            require_engine(rank, SIZE, f"{name}({parameter}={value})")

    run_ranks(SIZE, body)


@pytest.mark.parametrize("name", sorted(GOOD.keys() - ALONE))
@pytest.mark.parametrize("wire", at_length(["messages", "node"], ["node"]), indirect=True)
def test_a_bad_argument_on_one_rank_is_told_to_the_others_or_can_be_mended(name, wire):
    function = getattr(rc, name)

    def body(rank):
        for parameter, value in cases_of(function, BROKE):
            if is_another_call(name, parameter, value):
                continue
            n_before, error = n_begun(), None
            if rank == 1:
                error = come_to(function, GOOD[name](rank) | {parameter: VALUES[value]()})
            label = f"{name}({parameter}={value}): {error!r}"
            if rank == 0 or n_begun() == n_before:  # nobody knows of it: it can be mended
                come_to(function, GOOD[name](rank))
            elif error is not None:
                assert isinstance(error, rc.MismatchError), label
            require_engine(rank, SIZE, label)

    run_ranks(SIZE, body)


def test_what_is_refused_on_one_rank_alone_leaves_the_others_their_operations():
    def body(rank):
        handle = rc.allreduce_async(np.full(3, rank))
        if rank == 1:
            with pytest.raises(
                TypeError, match="when_done: the callback must be a function, not 3"
            ):
                handle.when_done(3)
            for call in (rc.send, rc.recv):
                with pytest.raises(TypeError, match=r"group must be a ringcomm\.Group .*, not 'x'"):
                    call(np.ones(3), 0, group="x")
        assert (handle.wait() == 1).all()
        require_engine(rank, SIZE, "when_done")

    run_ranks(SIZE, body)


def first_of(dealt):
    """Use what deals out samples."""
    next(iter(dealt), None)
    len(dealt)


def used(make, **options):
    """Make what deals out samples, or read a file; use it."""
    first_of(make(**options))


def sampler():
    return data.ShardedSampler(10, rank=0, size=2)


DATA = {
    "Batches": lambda: {"sampler": sampler(), "batch_size": 2},
    "Loader": lambda: {"data": np.arange(10), "batch_size": 2, "sampler": sampler()},
    "ShardedSampler": lambda: {"data": 10, "rank": 0, "size": 2},
    "WorkQueue": lambda: {"n": 10, "size": 5, "name": "work", "seed": 1},
}
METHODS = {"batches": {"batch_size": 2}, "load_state_dict": {}, "set_epoch": {}, "state_dict": {}}


def test_what_data_is_dealt_out_by_refuses_a_bad_argument():
    assert public(data) == DATA.keys()
    for name, good in DATA.items():
        function = getattr(data, name)
        for parameter, value in cases_of(function):
            options = good() | {parameter: VALUES[value]()}
            come_to(partial(used, function), options)
    for name, good in METHODS.items():
        for parameter, value in cases_of(getattr(sampler(), name)):
            mine = sampler()
            come_to(getattr(mine, name), good | {parameter: VALUES[value]()})
            first_of(mine)
    for key, value in itertools.product(state := sampler().state_dict(), VALUES):
        mine = sampler()
        come_to(mine.load_state_dict, {"state": state | {key: VALUES[value]()}})
        first_of(mine)
