"""What differs from Horovod in names, arguments and errors is what docs/horovod.md lists."""

import builtins
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks

import ringcomm.torch as hvd
from ringcomm.torch import as_horovod

PAGE = (Path(__file__).parents[2] / "docs" / "horovod.md").read_text()


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def told():
    """Return by name or call, as in the table's first column, the words and what comes of it."""
    table = PAGE.partition("## Every difference")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in re.findall(r"^\|(.*)\|$", table, re.MULTILINE)[2:]]
    return {
        each: (
            {word.partition("=")[0] for word in code(theirs) + code(ours)},
            (code(ours) or [ours.strip()])[0],
        )
        for first, theirs, ours, _ in rows
        for each in code(first)
    }


TOLD = told()

# --- Horovod 0.28.1, from its modules: names, arguments, defaults ---------------------------------
SET = "process_set=global_process_set"
FACTORS = "prescale_factor=1.0 postscale_factor=1.0"
REDUCED = f"average=None name=None op=None {FACTORS} {SET}"
PACKED = f"average=None name=None compression=Compression.none op=None {FACTORS} {SET}"
SCATTERED = f"name=None op=Average {SET} {FACTORS}"
PACKED_SCATTERED = f"name=None compression=Compression.none op=Average {SET} {FACTORS}"
COLLECTIVES = {
    "allreduce": f"tensor {PACKED}",
    "allreduce_ allreduce_async allreduce_async_": f"tensor {REDUCED}",
    "grouped_allreduce": f"tensors {PACKED}",
    "grouped_allreduce_ grouped_allreduce_async grouped_allreduce_async_": f"tensors {REDUCED}",
    "sparse_allreduce_async": f"tensor name op {SET}",
    "allgather allgather_async": f"tensor name=None {SET}",
    "grouped_allgather grouped_allgather_async": f"tensors name=None {SET}",
    "broadcast broadcast_ broadcast_async broadcast_async_": f"tensor root_rank name=None {SET}",
    "alltoall alltoall_async": f"tensor splits=None name=None {SET}",
    "reducescatter": f"tensor {PACKED_SCATTERED}",
    "reducescatter_async": f"tensor {SCATTERED}",
    "grouped_reducescatter": f"tensors {PACKED_SCATTERED}",
    "grouped_reducescatter_async": f"tensors {SCATTERED}",
    "join": "device=-1",
    "barrier": SET,
    "poll synchronize": "handle",
}
BASICS = {
    "init": "comm=None process_sets=None",
    "start_timeline": "file_path mark_cycles=False",
    "shutdown is_initialized stop_timeline size local_size cross_size rank local_rank": "",
    "cross_rank mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built": "",
    "nccl_built ddl_built ccl_built cuda_built rocm_built": "",
}
PROCESS_SETS = {
    "ProcessSet": "ranks_or_comm",
    "add_process_set remove_process_set": "process_set",
}
STATE = {
    "broadcast_parameters": "params root_rank",
    "broadcast_optimizer_state": "optimizer root_rank model=None",
    "broadcast_object": f"obj root_rank=0 name=None {SET}",
    "allgather_object": "obj name=None",
}
OPTIMIZER = {
    "DistributedOptimizer": "optimizer named_parameters=None compression=Compression.none "
    "backward_passes_per_step=1 op=Average gradient_predivide_factor=1.0 num_groups=0 groups=None "
    f"sparse_as_dense=False {SET}"
}
NORM = {"SyncBatchNorm": "num_features eps=1e-05 momentum=0.1 affine=True track_running_stats=True"}
AUTOGRAD = (
    "HorovodAllreduce HorovodGroupedAllreduce HorovodAllgather HorovodGroupedAllgather "
    "HorovodBroadcast HorovodAlltoall HorovodReducescatter HorovodGroupedReducescatter"
)
RUN = (
    "func args=() kwargs=None num_proc=1 min_num_proc=None max_num_proc=None slots=None "
    "reset_limit=None cooldown_range=None hosts=None hostfile=None host_discovery_script=None "
    "start_timeout=None ssh_port=None ssh_identity_file=None disable_cache=None "
    "output_filename=None verbose=None use_gloo=None use_mpi=None mpi_args=None "
    "network_interface=None network_interfaces=None executable=None np=None min_np=None max_np=None"
)
NOT_CALLED = None  # what is there, and has no arguments of its own
HOROVOD = {
    "horovod": {"__version__": NOT_CALLED, "run": RUN},
    "horovod.runner": {"run": RUN},
    "horovod.torch": {
        **COLLECTIVES,
        **BASICS,
        **PROCESS_SETS,
        **STATE,
        **OPTIMIZER,
        **NORM,
        "Average Sum Adasum Min Max Product Compression": NOT_CALLED,
        "HorovodInternalError elastic global_process_set": NOT_CALLED,
    },
    "horovod.torch.mpi_ops": {
        **COLLECTIVES,
        **BASICS,
        **PROCESS_SETS,
        AUTOGRAD: NOT_CALLED,
        "Average Sum Adasum Min Max Product global_process_set": NOT_CALLED,
        "is_homogeneous": "",
        "handle_average_backwards_compatibility": "op average",
    },
    "horovod.torch.functions": STATE,
    "horovod.torch.optimizer": OPTIMIZER,
    "horovod.torch.sync_batch_norm": NORM,
    "horovod.torch.compression": {
        "Compressor NoneCompressor FP16Compressor Compression": NOT_CALLED
    },
    "horovod.torch.elastic": {
        "run": NOT_CALLED,
        "TorchState": "model=None optimizer=None **kwargs",
        "ElasticSampler": "dataset shuffle=True seed=0",
    },
    "horovod.common.elastic": {
        "State": "bcast_object get_rank",
        "ObjectState": "bcast_object get_rank **kwargs",
        "run_fn": "func reset",
    },
    "horovod.common.basics": {"HorovodBasics": NOT_CALLED},
    "horovod.common.process_sets": {**PROCESS_SETS, "global_process_set": NOT_CALLED},
    "horovod.common.exceptions": {
        "HorovodInternalError": NOT_CALLED,
        "HostsUpdatedInterrupt": "skip_sync",
        "HorovodVersionMismatchError": "name version installed_version",
        "get_version_mismatch_message": "name version installed_version",
    },
    "horovod.common.util": {
        "EXTENSIONS": NOT_CALLED,
        "get_ext_suffix": "",
        "get_extension_full_path": "pkg_path *args",
        "check_extension": "ext_name ext_env_var pkg_path *args",
        "extension_available gpu_available": "ext_base_name verbose=False",
        "mpi_built gloo_built nccl_built ddl_built ccl_built": "verbose=False",
        "env": "**kwargs",
        "get_average_backwards_compatibility_fun": "reduce_ops",
        "num_rank_is_power_2": "num_rank",
        "split_list": "l n",
        "check_installed_version": "name version exception=None",
        "is_iterable": "x",
        "is_version_greater_equal_than": "ver target",
    },
}


# --- names and arguments --------------------------------------------------------------------------
@pytest.fixture
def alias():
    """Let `import horovod` work in this process, for one test."""
    as_horovod.install()
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "horovod"]:
        del sys.modules[name]


def test_names_and_arguments_differ_as_the_page_says(alias):
    assert dict(differences()) == {
        name: words for name, (words, _) in TOLD.items() if "(" not in name
    }


def differences():
    """Yield each name that differs, and what does."""
    for module, table in HOROVOD.items():
        there = vars(sys.modules[module]) if module in sys.modules else {}
        prefix = "" if module.startswith("horovod.torch") else f"{module}."
        for names, arguments in table.items():
            for name in names.split():
                words = differing(there, name, arguments)
                if words:
                    yield prefix + name, words


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def differing(there, name, arguments):
    """Return the arguments that differ, "*" if some go by keyword alone; {"missing"} if it does."""
    if name not in there:
        return {"missing"}
    if arguments is NOT_CALLED:
        return set()
    parameters = inspect.signature(there[name]).parameters.values()
    ours = {_STARS.get(p.kind, "") + p.name: shown(p) for p in parameters}
    theirs = of_text(arguments)
    by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY and p.name in theirs]
    assert by_place == [each for each in theirs if each in by_place], name
    others = {each for each in {*ours, *theirs} if ours.get(each) != theirs.get(each)}
    is_named = any(p.kind is p.KEYWORD_ONLY and p.name in theirs for p in parameters)
    return others | ({"*"} if is_named else set())


def of_text(arguments):
    parts = [each.partition("=") for each in arguments.split()]
    return {name: default for name, _, default in parts}


def shown(parameter):
    """Return the default as Horovod's sources write it; "" if there is none."""
    default = parameter.default
    known = [
        (parameter.empty, ""),
        (hvd.Compression.none, "Compression.none"),
        (hvd.global_process_set, "global_process_set"),
        (hvd.Average, "Average"),
    ]
    return next((text for each, text in known if default is each), repr(default))


# --- what calls come to ---------------------------------------------------------------------------
@pytest.mark.parametrize("call", [each for each in TOLD if "(" in each])
def test_calls_end_as_the_page_says(call):
    outcome = TOLD[call][1]

    def body(rank):
        model = torch.nn.Linear(2, 2)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        names = {"hvd": hvd, "torch": torch, "x": torch.ones(6, 2), "model": model, "sgd": sgd}
        if outcome == "works":
            eval(call, names)
        else:
            with pytest.raises(getattr(builtins, outcome)):
                eval(call, names)
        return hvd.allreduce(torch.ones(1), op=hvd.Sum).item()

    assert run_ranks(3, body) == [3, 3, 3]
