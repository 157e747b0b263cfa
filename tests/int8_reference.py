"""Int8 in plain numpy: what the compiled kernel, and that of any device, must give bit for bit."""

import numpy as np

ROTATIONS = ((10, 26), (11, 21), (13, 27), (23, 5), (6, 20), (17, 11), (25, 10), (18, 20))
U32 = np.uint32


def threefry4x32(counter, key):
    """Return Threefry4x32-20 of four arrays of uint32 (Salmon et al. 2011)."""
    keys = [U32(k) for k in key] + [U32(0x1BD11BDA) ^ np.bitwise_xor.reduce(np.array(key, U32))]
    x = [np.asarray(c, U32) + k for c, k in zip(counter, keys, strict=False)]
    for r in range(20):
        pairs = ((0, 1), (2, 3)) if r % 2 == 0 else ((0, 3), (2, 1))
        for (a, b), by in zip(pairs, ROTATIONS[r % 8], strict=True):
            x[a] = x[a] + x[b]
            x[b] = (x[b] << U32(by) | x[b] >> U32(32 - by)) ^ x[a]
        if r % 4 == 3:
            turn = r // 4 + 1
            x = [x[j] + keys[(turn + j) % 5] for j in range(4)]
            x[3] = x[3] + U32(turn)
    return x


def random_numbers(count, seed, draw):
    """Return number i of (seed, draw) at place i."""
    i = np.arange(count)
    counter = i // 256 * 64 + i % 64
    draw_words = [np.full(count, word, U32) for word in (draw & 0xFFFFFFFF, draw >> 32)]
    with np.errstate(over="ignore"):
        lanes = threefry4x32(
            [counter.astype(U32), (counter >> 32).astype(U32), *draw_words],
            [seed & 0xFFFFFFFF, seed >> 32, 0, 0],
        )
    return np.choose(i % 256 // 64, lanes)


def encode_int8(x, block, seed, draw):
    """Return the payload: scales, then codes. x is finite."""
    work = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
    wide = x.astype(work)
    starts = range(0, x.size, block)
    top = np.array([np.abs(wide[i : i + block]).max() for i in starts], work)
    scales = np.maximum(top / work.type(127), np.finfo(work).tiny)
    with np.errstate(over="ignore"):
        scales = np.where(np.isfinite(scales * work.type(127)), scales, np.nextafter(scales, 0))
    parts = np.clip(wide / np.repeat(scales, block)[: x.size], -127, 127)
    fixed = np.trunc(parts * work.type(1 << 24)).astype(np.int64)
    codes = (fixed + (random_numbers(x.size, seed, draw) >> 8)) >> 24
    return scales.tobytes() + codes.astype(np.int8).tobytes()
