"""A worker that pushes to and pulls from a server of another host; see ci/ps_wire.py."""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np

import ringcomm as rc
from ringcomm import ps


def n_sent_and_received():
    """Return the bytes that have left and reached this host by its link."""
    line = re.search(r"eth0:(.*)", Path("/proc/self/net/dev").read_text())[1].split()
    return int(line[8]), int(line[0])


def main():
    count, n_times = int(sys.argv[1]), int(sys.argv[2])
    ps.init(servers=1)
    table = ps.table("w", count, updater=ps.optim.SGD(0.1), mode="async")
    gradient, out = np.ones(count, np.float32), np.empty(count, np.float32)
    table.push(gradient).wait()
    table.pull(out=out).wait()
    sent, _ = n_sent_and_received()
    began = time.monotonic()
    for _ in range(n_times):
        table.push(gradient).wait()
    pushed, between = time.monotonic(), n_sent_and_received()
    for _ in range(n_times):
        ps.complete_step()  # else nothing has changed, and nothing need be sent
        table.pull(out=out).wait()
    pulled = time.monotonic()
    _, received = n_sent_and_received()
    result = {
        "payload": gradient.nbytes * n_times,
        "sent": between[0] - sent, "received": received - between[1],
        "push_s": pushed - began, "pull_s": pulled - pushed,
    }  # fmt: skip
    print("wire", json.dumps(result), flush=True)
    rc.shutdown()


if __name__ == "__main__":
    main()
