#!/usr/bin/env python3
"""Measures pushes and pulls between two fake hosts: bytes on the wire, and time. Needs root.

usage: .venv/bin/python ci/ps_wire.py [--mib 16] [--times 4] [--rate 200mbit|none]

Ends with 1 if more than 1.05 of the payload is on the wire or, at a rate, if it takes more than 1.2
of the time that one TCP connection takes.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from fakecluster import running
from measure_link_rate import measure
from storms import place

JOB = Path(__file__).with_name("ps_wire_job.py")
LIMIT_S = 120


def measure_wire(cluster, nbytes, n_times):
    """Return what the job prints: bytes and seconds."""
    inside, layout = place(cluster, 1)
    command = [
        *inside, Path(sys.executable).parent / "mpirun", *layout, "-np", "2",
        sys.executable, JOB, str(nbytes // 4), str(n_times),
    ]  # fmt: skip
    root = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM")
    done = subprocess.run(
        command, env=os.environ | dict.fromkeys(root, "1"), capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    found = re.search(r"^wire (.*)", done.stdout, re.MULTILINE)
    if done.returncode or found is None:
        raise RuntimeError(f"the job ended with {done.returncode}: {done.stdout}{done.stderr}")
    return json.loads(found[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--rate", default="200mbit")
    args = parser.parse_args()
    with running(f"ps-wire-{os.getpid()}", 2, args.rate) as cluster:
        rate = measure(cluster, "h0", "h1")
        wire = measure_wire(cluster, args.mib << 20, args.times)
    payload, is_bad = wire["payload"], False
    for what, on_wire in (("push", wire["sent"]), ("pull", wire["received"])):
        bytes_ratio = on_wire / payload
        time_ratio = wire[f"{what}_s"] / (payload / rate)
        print(
            f"{what}: {payload / 1e6:.1f} MB, {bytes_ratio:.4f} of it on the wire, "
            f"{payload / wire[f'{what}_s'] / 1e6:.1f} MB/s; one TCP connection: {rate / 1e6:.1f}"
        )
        is_bad |= bytes_ratio > 1.05 or (args.rate != "none" and time_ratio > 1.2)
    sys.exit(is_bad)


if __name__ == "__main__":
    main()
