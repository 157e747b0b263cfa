"""The collectives of MPI and of torch.distributed, as `ringcomm bench` measures its own.

Each of PEERS is made on all ranks after rc.init(), and returns a Bind of ringcomm.launch.bench.
"""

import numpy as np

import ringcomm as rc

ROOT = 0
ROOTED = ("reduce", "gather")


class Refusals:
    """Says once, on rank 0, why an engine leaves something out."""

    def __init__(self, name):
        self.name, self.said = name, set()

    def __call__(self, reason):
        if reason not in self.said and rc.rank() == ROOT:
            print(f"# without {self.name}: {reason}", flush=True)
        self.said.add(reason)


def own_result(case, send, recv):
    """Return what of recv is the result: in place, reduce_scatter leaves it in the first part."""
    if case.collective == "barrier" or (case.collective in ROOTED and rc.rank() != ROOT):
        return None
    is_part = case.collective == "reduce_scatter" and recv is send
    return recv[: case.part] if is_part else recv


# --- MPI ------------------------------------------------------------------------------------------
def native():
    """MPI's own collectives, through mpi4py. After a death they hang or return wrong sums."""
    from mpi4py import MPI

    comm, refuse = MPI.COMM_WORLD.Dup(), Refusals("native")

    def bind(case, send, recv):
        name, op, dtype = case.collective, case.op, case.dtype
        if op and dtype.name in ("float16", "bfloat16"):
            return refuse(f"MPI reduces no {dtype}")
        if op == "average" and dtype.kind not in "fc":
            return refuse("MPI has no AVERAGE, and a sum divided by numpy is fair for floats only")
        start = _starter(MPI, comm, case, _known(send), _known(recv), recv is send)
        result = own_result(case, send, recv)
        if op == "average" and result is not None:

            def average():
                start()
                return np.divide(result, case.size, out=result)

            return average

        def call():
            start()
            return result

        if name != "broadcast" or recv is send or rc.rank() != ROOT:
            return call

        def copy_first():  # MPI has no form that leaves the argument alone
            np.copyto(recv, send)
            return call()

        return copy_first

    return bind


def _starter(mpi, comm, case, send, recv, in_place):
    is_root = rc.rank() == ROOT
    source, op = mpi.IN_PLACE if in_place else send, _operator(mpi, case)
    at_root = recv if is_root else None
    return {
        "allreduce": lambda: comm.Allreduce(source, recv, op),
        "reduce": lambda: comm.Reduce(source if is_root else send, at_root, op, ROOT),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(source, recv, op),
        "allgather": lambda: comm.Allgather(send, recv),
        "gather": lambda: comm.Gather(send, at_root, ROOT),
        "scatter": lambda: comm.Scatter(send if is_root else None, recv, ROOT),
        "alltoall": lambda: comm.Alltoall(send, recv),
        "broadcast": lambda: comm.Bcast(recv, ROOT),
        "barrier": comm.Barrier,
    }[case.collective]


def _operator(mpi, case):
    if case.dtype.kind == "b":
        logical = {"sum": "LOR", "max": "LOR", "bor": "LOR", "bxor": "LXOR"}
        return getattr(mpi, logical.get(case.op, "LAND"))
    names = {"product": "PROD", "average": "SUM", "": "SUM"}
    return getattr(mpi, names.get(case.op, case.op.upper()))


def _known(x):
    """Return x as elements that MPI has a name for: it only moves those it has none for."""
    return x.view(np.uint16) if x.dtype.name in ("float16", "bfloat16") else x


# --- torch.distributed ----------------------------------------------------------------------------
TORCH_DTYPES = {"float16", "bfloat16", "float32", "float64", "bool", "complex64", "complex128"}
TORCH_DTYPES |= {"int8", "uint8", "int32", "int64"}


def start_torch():
    """Make torch.distributed's default group, over ringcomm."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("ringcomm", init_method="mpi://")
    return dist


def gloo():
    """torch.distributed's collectives over gloo, on tensors that share memory with the arrays."""
    dist = start_torch()
    return _of_group("gloo", dist.new_group(backend="gloo"))


def torch():
    """The same over ringcomm."""
    return _of_group("torch", start_torch().group.WORLD)


def _of_group(label, group):
    refuse = Refusals(label)

    def bind(case, send, recv):
        name, op, dtype = case.collective, case.op, case.dtype
        if dtype.name not in TORCH_DTYPES:
            return refuse(f"torch.distributed knows no {dtype}")
        if op and dtype.kind == "c" and op not in ("sum", "average"):
            return refuse(f"gloo has no {op} of {dtype}")
        if (dtype.name, op) == ("bool", "sum"):
            return refuse("gloo adds bools as bytes")
        x, result = _tensor(send), own_result(case, send, recv)
        out = x if recv is send else _tensor(recv)
        if recv is send and name == "reduce_scatter":
            out = x[rc.rank() * case.part :][: case.part]
            result = send[rc.rank() * case.part :][: case.part]
        copies = out is not x and name in ("allreduce", "reduce", "broadcast")  # are in place
        rounding = None if out.is_floating_point() or out.is_complex() else "trunc"
        start = _torch_starter(case, group, x, out)

        def call():
            if copies:
                out.copy_(x)
            start()
            if op == "average":  # gloo has none
                out.div_(case.size, rounding_mode=rounding)
            return result

        return call

    return bind


def _torch_starter(case, group, x, out):
    import torch.distributed as dist

    names = {"average": "SUM", "": "SUM"}
    op = getattr(dist.ReduceOp, names.get(case.op, case.op.upper()))
    is_root = rc.rank() == ROOT
    # torch 2.13 renamed them, and warns of the names that 2.6 has.
    gather_all = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def parts(whole):
        return list(whole.chunk(case.size)) if is_root else None

    return {
        "allreduce": lambda: dist.all_reduce(out, op, group=group),
        "reduce": lambda: dist.reduce(out, ROOT, op, group=group),
        "reduce_scatter": lambda: scatter_sum(out, x, op=op, group=group),
        "allgather": lambda: gather_all(out, x, group=group),
        "broadcast": lambda: dist.broadcast(out, ROOT, group=group),
        "gather": lambda: dist.gather(x, parts(out), ROOT, group=group),
        "scatter": lambda: dist.scatter(out, parts(x), ROOT, group=group),
        "alltoall": lambda: dist.all_to_all_single(out, x, group=group),
        "barrier": lambda: dist.barrier(group=group),
    }[case.collective]


def _tensor(x):
    """Return a tensor of x's memory."""
    import torch

    if x.dtype.name == "bfloat16":  # which numpy does not know itself
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


PEERS = {"native": native, "gloo": gloo, "torch": torch}
