"""Measures what one TCP connection carries between two hosts of the fake cluster.

python measure_link_rate.py sink                  print the port, then the bytes per second received
python measure_link_rate.py source ADDRESS PORT   send until the sink has enough
"""

import contextlib
import socket
import subprocess
import sys
import time

from fakecluster import ClusterError

WARM_UP_S, MEASURED_S = 0.5, 1.5
_BLOCK = 1 << 20
_STALL_S = 5.0


def measure(cluster, source, dest):
    """Return the bytes per second that arrive at `dest`, once the connection is up to speed.

    Raises:
        ClusterError: nothing comes through.
    """
    me, quiet = [sys.executable, __file__], subprocess.DEVNULL
    at_source, at_dest = cluster.entering(source), cluster.entering(dest)
    command = [*at_dest, *me, "sink"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, text=True) as sink:
        port = sink.stdout.readline().strip()
        sending = [*at_source, *me, "source", cluster.address(dest), port]
        subprocess.run(sending, stderr=quiet, check=False)
        rate = sink.stdout.read()
    if sink.returncode != 0:
        raise ClusterError(f"nothing comes through from {source} to {dest}")
    return float(rate)


def be_sink():
    with socket.create_server(("", 0)) as server:
        server.settimeout(_STALL_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_STALL_S)
        receive(connection, WARM_UP_S)
        print(receive(connection, MEASURED_S), flush=True)


def receive(connection, seconds):
    """Receive for so long; return bytes per second."""
    buffer = bytearray(_BLOCK)
    start, nbytes = time.monotonic(), 0
    while (passed := time.monotonic() - start) < seconds:
        n = connection.recv_into(buffer)
        if n == 0:
            raise ConnectionError("the sender has gone")
        nbytes += n
    return nbytes / passed


def be_source(address, port):
    block = bytes(_BLOCK)
    connection = socket.create_connection((address, int(port)), timeout=_STALL_S)
    with connection, contextlib.suppress(ConnectionError):  # the sink has enough
        while True:
            connection.sendall(block)


if __name__ == "__main__":
    be_sink() if sys.argv[1] == "sink" else be_source(*sys.argv[2:])
