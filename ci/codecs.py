"""Bytes and speed of the codecs, beside a copy of the array in the same run.

    python ci/codecs.py [--kib 1 64 4096 65536] [--dtype float32]

A ratio is the time of memcpy of the array that is encoded, over that of the call: 1 is as fast as
copying it, 0.5 takes twice as long. What is compared runs in turns; medians.
"""

import argparse
import sys
import time
from statistics import median

import numpy as np

from ringcomm import codec

SECONDS = 0.4  # for each line of the table
CODECS = {
    "Identity": codec.Identity(),
    "FP16": codec.FP16(),
    "BF16": codec.BF16(),
    "Int8": codec.Int8(),
    "TopK(0.01)": codec.TopK(0.01),
    "TopK(0.1)": codec.TopK(0.1),
}


def calls(x):
    """Return what is timed, by (codec, direction)."""
    copy, y = np.empty_like(x), np.empty_like(x)
    table = {("memcpy", ""): lambda: np.copyto(copy, x)}
    for name, each in CODECS.items():
        buffer = each.encode(x, draw=0)
        table[name, "encode"] = lambda each=each, out=buffer: each.encode(x, out=out, draw=0)
        table[name, "decode"] = lambda each=each, buffer=buffer: each.decode(buffer, y)
        residual = codec.Residual(each)
        table[name, "with residual"] = lambda r=residual, out=buffer: r.encode(
            "x", x, lr=0.1, draw=0, out=out
        )
    return table


def seconds(call, repeats):
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - begin) / repeats


def timed(table, nbytes):
    """Return the median seconds of each call."""
    repeats = max(1, (1 << 20) // nbytes)
    rounds = []
    begin = time.monotonic()
    while len(rounds) < 5 or time.monotonic() - begin < SECONDS * len(table):
        rounds.append([seconds(call, repeats) for call in table.values()])
    return dict(zip(table, map(median, zip(*rounds, strict=True)), strict=True))


def report(kib, dtype):
    x = np.random.default_rng(0).standard_normal((kib << 10) // np.dtype(dtype).itemsize)
    x = x.astype(dtype)
    times = timed(calls(x), x.nbytes)
    copy = times["memcpy", ""]
    print(f"\n{kib} KiB of {dtype}; memcpy {x.nbytes / copy / 1e9:.1f} GB/s, {copy * 1e6:.2f} us")
    print(f"  {'':12}{'bytes':>8}{'encode':>10}{'decode':>10}{'encode with residual':>24}")
    for name, each in CODECS.items():
        share = each.encoded_nbytes(x.size, dtype) / x.nbytes
        took = [times[name, way] for way in ("encode", "decode", "with residual")]
        if kib < 64:
            cells = [f"{t * 1e6:.1f} us" for t in took]
        else:
            cells = [f"{copy / t:.2f}" for t in took]
        print(f"  {name:12}{share:8.1%}{cells[0]:>10}{cells[1]:>10}{cells[2]:>24}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 64, 4096, 65536])
    parser.add_argument("--dtype", choices=["float16", "float32", "float64"], default="float32")
    given = parser.parse_args()
    for kib in given.kib:
        report(kib, given.dtype)


if __name__ == "__main__":
    sys.exit(main())
