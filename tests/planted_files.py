"""What somebody may have put where a file is expected, and copies of files that are damaged."""

import contextlib
import os
import random
import signal

import pytest

LONGEST_S = 20

# What a reader finds there. The first ones are no file that can be read as a whole.
WITHOUT_END = ("a pipe", "a device", "a terabyte")
NONSENSE = {
    "deep JSON": b"[" * 200_000,
    "deep objects": b'{"a":' * 200_000,
    "NaN": b"NaN",
    "a number": b"5",
    "a list": b"[]",
    "another object": b'{"a": 1}',
    "all bytes": bytes(range(256)) * 4,
    "other digits": "\u00b2 h1 \u00b2\n".encode(),
    "numbers without end": b"9" * 5000 + b" h1 " + b"9" * 5000 + b"\n",
}
PLANTS = (*WITHOUT_END, *NONSENSE)


def plant(path, what):
    """Put something in the place of a file."""
    path.unlink(missing_ok=True)
    if what == "a pipe":
        os.mkfifo(path)
    elif what == "a device":
        path.symlink_to("/dev/zero")
    elif what == "a terabyte":
        path.touch()
        os.truncate(path, 1 << 40)
    else:
        path.write_bytes(NONSENSE[what])


@contextlib.contextmanager
def in_time():
    """End the test if the block takes too long. For the main thread."""

    def end(number, frame):
        pytest.fail(f"this took more than {LONGEST_S} s")  # what no `except Exception` catches

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LONGEST_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def damaged(data, n_flips, n_cuts, seed=61):
    """Yield copies of a file with one bit changed, or without its end."""
    chance = random.Random(seed)
    for bit in chance.sample(range(8 * len(data)), min(n_flips, 8 * len(data))):
        out = bytearray(data)
        out[bit // 8] ^= 1 << bit % 8
        yield bytes(out)
    for end in {0, 1, len(data) - 1, *chance.sample(range(len(data)), min(n_cuts, len(data)))}:
        yield data[:end]
