"""The same pushes and pulls by torch.distributed.rpc; see ci/ps_wire.py.

python ps_wire_torch_rpc_job.py client|server ADDRESS PORT COUNT N_TIMES
"""

import json
import sys
import time

import torch
from ps_wire_job import n_sent_and_received
from torch.distributed import rpc

LEARNED = {}  # on the server


def make(count):
    LEARNED["w"] = torch.zeros(count)


def add(x):
    LEARNED["w"].add_(x, alpha=-0.1)


def get():
    return LEARNED["w"]


def measure(count, n_times):
    """Return bytes and seconds, as ps_wire_job.py."""
    rpc.rpc_sync("server", make, (count,))
    gradient = torch.ones(count)
    rpc.rpc_sync("server", add, (gradient,))
    rpc.rpc_sync("server", get)
    sent, _ = n_sent_and_received()
    began = time.monotonic()
    for _ in range(n_times):
        rpc.rpc_sync("server", add, (gradient,))
    pushed, between = time.monotonic(), n_sent_and_received()
    for _ in range(n_times):
        rpc.rpc_sync("server", get)
    pulled = time.monotonic()
    _, received = n_sent_and_received()
    return {
        "payload": gradient.nbytes * n_times,
        "sent": between[0] - sent, "received": received - between[1],
        "push_s": pushed - began, "pull_s": pulled - pushed,
    }  # fmt: skip


def main(name, address, port, count, n_times):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://{address}:{port}",
        _transports=["uv"], _channels=["basic"],  # else it notices that the hosts share a kernel
    )  # fmt: skip
    rank = ["server", "client"].index(name)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)
    if name == "client":
        print("wire", json.dumps(measure(int(count), int(n_times))), flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    import ps_wire_torch_rpc_job  # functions are sent by name: not those of __main__

    ps_wire_torch_rpc_job.main(*sys.argv[1:])
