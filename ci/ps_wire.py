#!/usr/bin/env python3
"""Measures pushes and pulls between two fake hosts: bytes on the wire, and time. Needs root.

usage: .venv/bin/python ci/ps_wire.py [--mib 16] [--times 4] [--rate 200mbit|none]
                                     [--against-torch-rpc] [--pairs 3]

Ends with 1 if more than 1.05 of the payload is on the wire or, at a rate, if it takes more than 1.2
of the time that one TCP connection takes. torch.distributed.rpc does the same in turn with it.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

from fakecluster import running
from measure_link_rate import measure
from storms import place

JOB = Path(__file__).with_name("ps_wire_job.py")
TORCH_RPC_JOB = JOB.with_name("ps_wire_torch_rpc_job.py")
LIMIT_S = 120
PORT = "29511"


def measure_wire(cluster, nbytes, n_times):
    """Return bytes and seconds of the pushes and pulls of a worker to a server of another host."""
    inside, layout = place(cluster, 1)
    command = [
        *inside, Path(sys.executable).parent / "mpirun", *layout, "-np", "2",
        sys.executable, JOB, str(nbytes // 4), str(n_times),
    ]  # fmt: skip
    return wire_of(command)


def measure_torch_rpc(cluster, nbytes, n_times):
    """Return the same of torch.distributed.rpc."""
    how = [cluster.address("h0"), PORT, str(nbytes // 4), str(n_times)]
    server, client = (
        [*cluster.entering(host), sys.executable, "-W", "ignore", TORCH_RPC_JOB, name, *how]
        for host, name in (("h0", "server"), ("h1", "client"))
    )
    with subprocess.Popen(server, stderr=subprocess.DEVNULL) as running_server:
        try:
            return wire_of(client)
        finally:
            running_server.terminate()


def wire_of(command):
    """Run a job; return what it prints about the wire."""
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    done = subprocess.run(
        command, env=os.environ | dict.fromkeys(root, "1"), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = re.search(r"^wire (.*)", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise RuntimeError(f"the job ended with {done.returncode}: {done.stdout}{done.stderr}")
    return json.loads(found[1])


def figures(wires, rate):
    """Yield push and pull: bytes on the wire / payload, bytes per second, time / the link's."""
    payload = wires[0]["payload"]
    for what, direction in (("push", "sent"), ("pull", "received")):
        on_wire = statistics.median(wire[direction] for wire in wires)
        seconds = statistics.median(wire[f"{what}_s"] for wire in wires)
        yield what, on_wire / payload, payload / seconds, seconds / (payload / rate)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--against-torch-rpc", action="store_true")
    parser.add_argument("--pairs", type=int, default=1)
    args = parser.parse_args()
    measures = {"ringcomm": measure_wire}
    if args.against_torch_rpc:
        measures["torch.distributed.rpc"] = measure_torch_rpc
    wires = {name: [] for name in measures}
    with running(f"ps-wire-{os.getpid()}", 2, args.rate) as cluster:
        rate = measure(cluster, "h0", "h1")
        for _ in range(args.pairs):
            for name, wire_by in measures.items():
                wires[name].append(wire_by(cluster, args.mib << 20, args.times))
    print(f"{args.times} times {args.mib} MiB; one TCP connection: {rate / 1e6:.1f} MB/s")
    is_bad = False
    for name, found in wires.items():
        for what, bytes_ratio, speed, time_ratio in figures(found, rate):
            print(
                f"{name}: {what}: {bytes_ratio:.4f} of the payload on the wire, "
                f"{speed / 1e6:.1f} MB/s, {time_ratio:.2f} of the connection's time"
            )
            is_slow = args.rate != "none" and time_ratio > 1.2
            is_bad |= name == "ringcomm" and (bytes_ratio > 1.05 or is_slow)
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
