"""Tell which package of the standard library a few lines of source are from.

    mpirun -np 3 python examples/ps_sparse_linear.py                            needs no torch
    RINGCOMM_PS_SERVERS=2 mpirun -np 4 python examples/ps_sparse_linear.py

Logistic regression with 2^20 weights in a hash table of the servers. The key of a weight is the
hash of a word, or of two in a row, and a package. A batch pulls and pushes only the keys in it.
Each push is an update ("async") by FTRL, whose l1 keeps most weights at exactly 0. Training and
test use different files.
"""

import argparse
import itertools
import re
import sysconfig
import zlib
from pathlib import Path

import numpy as np

import ringcomm as rc
from ringcomm import ps

PACKAGES = ("asyncio", "ctypes", "email", "importlib", "multiprocessing", "unittest", "xml")
LINES, BITS, BATCH, GOAL = 10, 20, 32, 0.75


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    args = parser.parse_args()

    ps.init()
    if ps.is_chief():
        print("cutting Python's library into snippets", flush=True)
    train, test = snippets()
    weights = ps.hashtable("weights", 1, updater=ps.optim.FTRL(lr=0.3, l1=0.02))
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(train))[rc.rank() :: rc.size()]
        for start in range(0, len(order), BATCH):
            learn(weights, [train[i] for i in order[start : start + BATCH]])
            if ps.is_chief() and start // BATCH % 100 == 0:
                print(f"epoch {epoch + 1}/{args.epochs}  {start / len(order):3.0%}", flush=True)
    rc.barrier()

    mine = test[rc.rank() :: rc.size()]
    n_right = sum(
        is_right(weights, mine[start : start + BATCH]) for start in range(0, len(mine), BATCH)
    )
    accuracy = rc.allreduce(np.array([n_right])).item() / len(test)
    counts = np.bincount([label for _, label in test])
    majority = counts.max() / counts.sum()
    if ps.is_chief():
        all_weights = weights.pull(np.arange(1 << BITS), missing="zero").wait()
        print(
            f"{rc.size()} workers: accuracy {accuracy:.1%} on {len(test)} snippets, the largest "
            f"package has {majority:.1%}; {np.count_nonzero(all_weights):,} of {1 << BITS:,} "
            f"weights are not 0, of {len(weights):,} with a row",
            flush=True,
        )
    assert accuracy >= GOAL >= majority + 0.25, (
        f"accuracy {accuracy:.1%}, by majority {majority:.1%}"
    )


# --- the model ----------------------------------------------------------------------------------
def learn(weights: ps.HashTable, batch: list[tuple[np.ndarray, int]]) -> None:
    keys, starts, scales = laid_out(batch)
    values = weights.pull(keys).wait()[:, :, 0]
    error = probabilities(values, starts, scales)
    error[np.arange(len(batch)), [label for _, label in batch]] -= 1
    counts = np.diff(starts, append=len(keys))
    gradients = np.repeat(error * scales[:, None], counts, axis=0).astype(np.float32)
    weights.push(keys, gradients[:, :, None])  # nobody waits for it


def is_right(weights: ps.HashTable, batch: list[tuple[np.ndarray, int]]) -> int:
    """Return how many snippets of a batch are told right."""
    keys, starts, scales = laid_out(batch)
    values = weights.pull(keys).wait()[:, :, 0]
    told = probabilities(values, starts, scales).argmax(1)
    return int((told == [label for _, label in batch]).sum())


def laid_out(batch: list[tuple[np.ndarray, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return keys, shape (features of all, packages), where each snippet begins, and its scale."""
    counts = np.array([len(features) for features, _ in batch])
    features = np.concatenate([features for features, _ in batch])
    mixed = features[:, None] * np.uint64(len(PACKAGES)) + np.arange(len(PACKAGES), dtype=np.uint64)
    keys = (mixed * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(64 - BITS)
    return keys, np.cumsum(counts) - counts, 1 / np.sqrt(counts)


def probabilities(values: np.ndarray, starts: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scores = np.add.reduceat(values, starts, axis=0) * scales[:, None]
    odds = np.exp(scores - scores.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


# --- the data -----------------------------------------------------------------------------------
def snippets() -> list[list[tuple[np.ndarray, int]]]:
    """Return (features, number of the package) of snippets to learn from, and to test with."""
    parts: list[list[tuple[np.ndarray, int]]] = [[], []]
    root = Path(sysconfig.get_path("stdlib"))
    for label, package in enumerate(PACKAGES):
        for path in sorted((root / package).rglob("*.py")):
            if {"test", "tests"} & set(path.parts):
                continue
            is_test = zlib.crc32(path.name.encode()) % 4 == 0
            lines = path.read_text(errors="replace").splitlines()
            for start in range(0, len(lines) - LINES + 1, LINES):
                features = features_of("\n".join(lines[start : start + LINES]))
                if len(features):
                    parts[is_test].append((features, label))
    return parts


def features_of(text: str) -> np.ndarray:
    """Return hashes of the words of a snippet, and of each two in a row."""
    words = re.findall(r"[^\W\d_]{2,}", text.lower())
    found = {*words, *(" ".join(two) for two in itertools.pairwise(words))}
    return np.array([zlib.crc32(each.encode()) for each in sorted(found)], np.uint64)


if __name__ == "__main__":
    main()
