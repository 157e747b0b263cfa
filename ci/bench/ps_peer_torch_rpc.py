"""torch.distributed.rpc as a parameter server: start_and_stop_ps_peers.py starts its processes.

python ps_peer_torch_rpc.py RANK SIZE PORT [TRANSPORT ...]     reads lines of JSON, answers so
"""

import ctypes
import gc
import json
import os
import signal
import sys
import threading
from pathlib import Path

import torch
from torch.distributed import rpc

SERVER = "server"
LEARNED = {}  # on the server
# Requests are carried out by 16 threads, and operators release the GIL: without it additions of
# four clients are lost (`mpirun -np 5 python ci/bench ps --cases sparse --against torch-rpc`).
ADDING = threading.Lock()
PR_SET_PDEATHSIG = 1


def make(name, shape):
    LEARNED.setdefault(name, torch.zeros(*shape))


def add(name, x):
    with ADDING:
        LEARNED[name].add_(x)


def get(name):
    return LEARNED[name]


def add_rows(name, keys, rows):
    with ADDING:
        LEARNED[name].index_add_(0, keys, rows)


def get_rows(name, keys):
    return LEARNED[name].index_select(0, keys)


class Client:
    """A client of the server; see Work."""

    def bind(self, case, x, keys):
        call, pushed, name = rpc.rpc_sync, torch.from_numpy(x), case.name
        call(SERVER, make, (name, (case.n_rows, *case.shape[1:])))
        if not case.is_sparse:
            return (
                lambda _: call(SERVER, add, (name, pushed)),
                lambda _: call(SERVER, get, (name,)),
            )
        sets = [torch.from_numpy(each.astype("int64")) for each in keys]
        return (
            lambda number: call(SERVER, add_rows, (name, sets[number], pushed)),
            lambda number: call(SERVER, get_rows, (name, sets[number])),
        )


def main(rank, size, port, *transports):
    # The kernel ends this process with its parent: while stopped, it would not notice.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=list(transports) or None
    )
    name = SERVER if int(rank) == int(size) - 1 else f"client{rank}"
    rpc.init_rpc(name, rank=int(rank), world_size=int(size), rpc_backend_options=options)
    gc.disable()
    work = None
    say("ready")
    for line in sys.stdin:
        what, *how = json.loads(line)
        if what == "close":
            break
        if what == "prepare":
            work = Work(Client(), Case(how[0], how[1], tuple(how[2]), how[3]))
            say("ready")
        else:
            found = getattr(work, what)
            say(found(*how) if callable(found) else found)
    rpc.shutdown()


def say(what):
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    # Functions are sent by name: they must not be those of __main__, which is another on each side.
    from bench import ps_peer_torch_rpc
    from bench.ps_workload import Case, Work

    ps_peer_torch_rpc.Case, ps_peer_torch_rpc.Work = Case, Work
    if os.getppid() == 1:
        sys.exit(1)
    ps_peer_torch_rpc.main(*sys.argv[1:])
