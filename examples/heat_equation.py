"""The 2-D heat equation on a grid of ranks, each of which has a block of the plate.

    mpirun -np 4 python examples/heat_equation.py --picture heat.png

The edges of the plate have temperature 0. It starts with a wave whose decay is known exactly, and
rank 0 compares; with --picture it starts with hot spots, and rank 0 draws how they have spread.
"""

import argparse
import math
import struct
import time
import zlib
from pathlib import Path

import numpy as np

import ringcomm as rc


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", type=int, default=240, help="of a side of the plate")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", type=Path, help="file for the picture, heat.png")
    options = parser.parse_args()
    rc.init()
    grid = rc.Grid((0, 0))  # as square as the number of ranks allows
    rows, columns = (share(options.cells, *at) for at in zip(grid.coords, grid.dims, strict=True))

    # A block has a ghost cell on each side. Those beyond an edge of the plate stay 0.
    x = np.zeros((len(rows) + 2, len(columns) + 2))
    x[1:-1, 1:-1] = (hot_spots if options.picture else wave)(rows, columns, options.cells)
    start = x[1:-1, 1:-1].copy()
    begun = time.perf_counter()
    for _ in range(options.steps):
        grid.exchange_halo(x)
        diffuse(x)
    step_us = (time.perf_counter() - begun) / options.steps * 1e6

    if not options.picture:
        error = np.abs(x[1:-1, 1:-1] - start * decay(options.cells) ** options.steps).max()
        error = rc.allreduce(error, rc.MAX)
        assert error < 1e-12, error
    heat, heat_at_start = rc.allreduce(np.array([x[1:-1, 1:-1].sum(), start.sum()]))
    plate = gathered(x[1:-1, 1:-1], grid, options.cells)
    if rc.rank() == 0:
        print(f"{options.cells} x {options.cells} cells on {grid.dims[0]} x {grid.dims[1]} ranks")
        left = heat / heat_at_start
        print(f"{options.steps} steps of {step_us:.0f} us; {left:.0%} of the heat is left")
        if options.picture:
            write_png(options.picture, colors(np.sqrt(plate / plate.max())))
            print(f"picture: {options.picture}")
        else:
            print(f"largest difference from the exact solution: {error:.1e}")
    rc.shutdown()


def share(n, part, parts):
    """Return the numbers of the cells along a dimension that a rank has, from 1 on."""
    return np.arange(n * part // parts, n * (part + 1) // parts) + 1


def diffuse(x, rate=0.2):
    """Make a step: each cell goes `rate` of the way to the sum of its neighbours' differences."""
    x[1:-1, 1:-1] += rate * (
        x[:-2, 1:-1] + x[2:, 1:-1] + x[1:-1, :-2] + x[1:-1, 2:] - 4 * x[1:-1, 1:-1]
    )


def wave(rows, columns, n):
    return np.outer(*(np.sin(math.pi * at / (n + 1)) for at in (rows, columns)))


def decay(n, rate=0.2):
    """Return what a step makes of wave(): it is multiplied by this number, in each cell."""
    return 1 - 8 * rate * math.sin(math.pi / 2 / (n + 1)) ** 2


def hot_spots(rows, columns, n):
    spots = np.random.default_rng(7).random((12, 3)) * [n, n, n / 12]
    distances = [np.hypot(rows[:, None] - i, columns - j) / (2 + r) for i, j, r in spots]
    return (np.min(distances, axis=0) < 1).astype(float)


def gathered(own, grid, n):
    """Return the whole plate on rank 0, None on the others."""
    parts = rc.gather(own.reshape(-1))
    if parts is None:
        return None
    plate, begin = np.empty((n, n)), 0
    for rank in range(grid.size):
        at = zip(grid.coords_of(rank), grid.dims, strict=True)
        rows, columns = (share(n, *each) - 1 for each in at)
        end = begin + len(rows) * len(columns)
        plate[np.ix_(rows, columns)] = parts[begin:end].reshape(len(rows), len(columns))
        begin = end
    return plate


def colors(heat):
    """Return red, green and blue of temperatures from 0 to 1: black, red, yellow, white."""
    return (255 * np.clip(3 * heat[..., None] - [0, 1, 2], 0, 1)).astype(np.uint8)


def write_png(path, pixels):
    """Write an array of shape (height, width, 3), uint8."""
    height, width, _ = pixels.shape
    lines = b"".join(b"\0" + line.tobytes() for line in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in chunks:
            crc = zlib.crc32(kind + data)
            file.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc))


if __name__ == "__main__":
    main()
