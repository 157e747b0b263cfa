"""`ringcomm bench` with more ways to make each call: named, grouped, hvd, dist, mpi4py, gloo.

All ways of one call take turns. gloo's threads sleep while others have their turn, so its own speed
is that of a run of `--ways gloo`. `ci/bench calls_table` makes the table of docs/benchmarks.md.
"""

import importlib.util
from functools import partial

import numpy as np
from bench.option_types import names_of
from bench.torch_group import start_torch

import ringcomm as rc
from ringcomm.launch import bench

N_GROUPED = 4
LINK_NBYTES, LINK_BATCHES = 4 << 20, 8


def main(argv):
    parser = bench.parser()
    parser.prog, parser.usage = "ci/bench calls", None
    parser.add_argument(
        "--ways", type=names_of(tuple(WAYS)), default=there(), metavar="NAME,...",
        help=f"{', '.join(WAYS)}; default all, without torch's where there is no torch",
    )  # fmt: skip
    args = parser.parse_args(argv)
    report = bench.measure_all(args, {name: WAYS[name] for name in args.ways})
    report["link_gbps"] = link_gbps() if report["hosts"] > 1 else None
    if report["link_gbps"] is not None:
        bench.say(f"link between hosts: {report['link_gbps'] * 1e3:.1f} MB/s each way")
    return bench.finish(args, report)


def there():
    has_torch = importlib.util.find_spec("torch") is not None
    return tuple(name for name in WAYS if has_torch or name not in OF_TORCH)


# --- ringcomm -------------------------------------------------------------------------------------
def named(call, a):
    return None if call == "memcpy" else bench.ringcomm_way(call, a, name=f"{call} {a.nbytes}")


def grouped(call, a):
    """Return a call with the same bytes in several arrays."""
    whole = a.part if call == "allgather" else a.x
    if not hasattr(rc, f"grouped_{call}") or a.part.size % N_GROUPED:
        return None
    if call == "reduce_scatter":  # a rank's parts of these are its part of the whole
        columns = np.split(whole.reshape(a.size, -1), N_GROUPED, axis=1)
        xs = [each.reshape(-1).copy() for each in columns]
    else:
        xs = np.split(whole, N_GROUPED)

    def result(found):
        rows = [each.reshape(a.size if call == "allgather" else 1, -1) for each in found]
        return np.concatenate(rows, axis=1).reshape(-1)

    return with_result(partial(getattr(rc, f"grouped_{call}"), xs), result)


def with_result(call, result):
    call.result = result  # see ringcomm.launch.bench.Way
    return call


def hvd(call, a):
    """Return a call of the API with Horovod's names."""
    import ringcomm.torch as hvd

    if a.dtype.name == "bfloat16":
        return None
    x, part = tensor(a.x), tensor(a.part)
    calls = {
        "barrier": hvd.barrier,
        "allreduce_": partial(hvd.allreduce_, x, op=hvd.Sum),
        "allreduce": partial(hvd.allreduce, x, op=hvd.Sum),
        "reduce_scatter": partial(hvd.reducescatter, x, op=hvd.Sum),
        "broadcast_": partial(hvd.broadcast_, x, 0),
        "broadcast": partial(hvd.broadcast, x, 0),
        "allgather": partial(hvd.allgather, part),
        "alltoall": partial(hvd.alltoall, x),
    }
    return calls.get(call)


# --- torch.distributed ----------------------------------------------------------------------------
def dist(call, a):
    """Return a call of torch.distributed over ringcomm."""
    return of_group(call, a, start_torch().group.WORLD)


GLOO = []  # the group, once it is made


def gloo(call, a):
    """Return the same over gloo."""
    if not GLOO:
        GLOO.append(start_torch().new_group(backend="gloo"))
    return of_group(call, a, GLOO[0])


def of_group(call, a, group):
    import torch.distributed as dist

    if a.dtype.name == "bfloat16":
        return None
    x, y, part = tensor(a.x), tensor(a.y), tensor(a.part)
    at_root, y_part = a.rank == bench.ROOT, tensor(a.y)[: part.numel()]
    # torch 2.13 renamed them, and warns of the names that 2.6 has.
    gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def parts(whole):
        return list(whole.chunk(a.size)) if at_root else None

    def swap():
        receiving = dist.irecv(y, a.before, group)
        dist.isend(x, a.after, group).wait()
        receiving.wait()

    send, recv = partial(dist.send, group=group), partial(dist.recv, group=group)
    calls = {
        "barrier": (partial(dist.barrier, group), None),
        "isend": (swap, None),
        "pingpong": (bench.pingpong(a.rank, x, y, send, recv), None),
        "allreduce_": (partial(dist.all_reduce, x, group=group), a.x),
        "reduce_": (partial(dist.reduce, x, 0, group=group), a.x),
        "reduce_scatter": (partial(scatter_sum, y_part, x, group=group), a.y[: a.part.size]),
        "broadcast_": (partial(dist.broadcast, x, 0, group=group), a.x),
        "allgather": (partial(gather_all, y, part, group=group), a.y),
        "gather": (partial(dist.gather, part, parts(y), 0, group=group), a.y),
        "scatter": (partial(dist.scatter, y_part, parts(x), 0, group=group), a.y[: a.part.size]),
        "alltoall": (partial(dist.all_to_all_single, y, x, group=group), a.y),
    }
    if call not in calls:
        return None
    start, found = calls[call]
    return with_result(start, lambda _: found)


def tensor(x):
    """Return a tensor of x's memory."""
    import torch

    return torch.from_numpy(x)


# --- the link between hosts -----------------------------------------------------------------------
def link_gbps():
    """Return the GB/s that each host can send while it receives. Collective.

    The first ranks of all hosts form a ring. In turn, each sends 4 MiB to the next one while it
    receives as much; to the previous one; and all take part in an allgather, whose messages are
    shorter. Calls follow each other as those of the collectives do; the best batch counts.
    """
    leaders = [r for r, local in enumerate(rc.allgather_object(rc.local_rank())) if local == 0]
    data, out = np.ones(LINK_NBYTES, np.uint8), np.empty(LINK_NBYTES, np.uint8)
    hosts, group = len(leaders), rc.Group(leaders)
    calls = [lambda: None] * 3
    if rc.rank() in leaders:
        place = leaders.index(rc.rank())
        after, before = leaders[(place + 1) % hosts], leaders[place - 1]
        part = data[: LINK_NBYTES // (hosts - 1)]  # so each rank sends and receives 4 MiB
        calls = [
            partial(rc.sendrecv, data, after, out, before),
            partial(rc.sendrecv, data, before, out, after),
            partial(rc.allgather, part, group=group),
        ]
    return LINK_NBYTES / np.min(bench.take_turns(calls, 0.0, LINK_BATCHES)) / 1e9


WAYS = {
    "ringcomm": bench.ringcomm_way,
    "rc.zeros": bench.shared_way,
    "named": named,
    "grouped": grouped,
    "hvd": hvd,
    "dist": dist,
    "mpi4py": bench.mpi4py_way,
    "gloo": gloo,
}
OF_TORCH = ("hvd", "dist", "gloo")
