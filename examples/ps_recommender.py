"""Recommend calls: sparse embeddings on the servers, learnt from the standard library's code.

    mpirun -np 3 python examples/ps_recommender.py                        two workers and one server
    RINGCOMM_PS_SERVERS=2 mpirun -np 4 python examples/ps_recommender.py

The users are the functions of the standard library, the items are the names that they call. Of
every other user one call is held out. The score is how often that call is among the ten that are
recommended from the user's other calls (recall@10). In CPython 3.11 it is 58 %, beside 25 % for
popularity and 55 % for item-kNN. (With cosines made asymmetric until they did best: 58 %.)

A user is the sum of the rows of its calls (ps.EmbeddingBag); an item has a row of its own to score
it (ps.Embedding). The model sees a part of a user's calls, and learns to tell all of them from
items drawn at random. A batch pulls the rows of both tables that are in it at once
(ps.EmbeddingCollection), and pushes their gradients. Each push is an update by Adagrad when it
arrives ("async"). No worker has an optimizer.
"""

import argparse
import ast
import sysconfig
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

import ringcomm as rc
from ringcomm.torch import ps

DIM, BATCH, DRAWN, K = 128, 128, 512, 10
SKIPPED = {
    "distutils", "encodings", "ensurepip", "idle_test", "idlelib", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    args = parser.parse_args()

    ps.init()
    if ps.is_chief():
        print("looking for calls in Python's library", flush=True)
    torch.set_num_threads(1)
    users, held_out, n_items = rc.broadcast_object(calls() if ps.is_chief() else None)
    if ps.is_chief():
        print(f"learning from {len(users):,} functions", flush=True)
    popularity = np.bincount(np.concatenate(users), minlength=n_items).astype(np.float32)
    chance = popularity**0.5 / (popularity**0.5).sum()
    model = Recommender()
    rng = np.random.default_rng(rc.rank())
    for epoch in range(args.epochs):
        order = np.random.default_rng(epoch).permutation(len(users))[rc.rank() :: rc.size()]
        for start in range(0, len(order), BATCH):
            drawn = rng.choice(n_items, DRAWN, p=chance)
            loss(model, [users[u] for u in order[start : start + BATCH]], drawn, rng).backward()
        if ps.is_chief():
            print(f"epoch {epoch + 1:2}/{args.epochs}", flush=True)
    rc.barrier()

    if ps.is_chief():
        print("comparing with popularity and item-kNN", flush=True)
        everything = torch.arange(n_items)
        with torch.no_grad():
            ours = recall(lambda some: model(some, everything).numpy(), users, held_out)
        popular = recall(lambda some: np.tile(popularity, (len(some), 1)), users, held_out)
        nearest = recall(item_knn(users, n_items), users, held_out)
        print(
            f"{rc.size()} workers: recall@{K} of {len(held_out)} calls {ours:.1%}, by popularity "
            f"{popular:.1%}, by item-kNN {nearest:.1%}",
            flush=True,
        )
        assert ours > 1.5 * popular, f"recall {ours:.1%}, by popularity {popular:.1%}"


# --- the model ----------------------------------------------------------------------------------
class Recommender(nn.Module):
    """Scores of items for users of whom some items are known."""

    def __init__(self) -> None:
        super().__init__()
        start, adagrad = ps.initializers.normal(std=0.1, seed=7), ps.optim.Adagrad(0.1)
        self.tables = ps.EmbeddingCollection({
            "known": ps.EmbeddingBag(
                None, DIM, name="known", bag="sum", init=start, optimizer=adagrad
            ),
            "items": ps.Embedding(None, DIM + 1, name="items", init=start, optimizer=adagrad),
        })  # fmt: skip

    def forward(self, some: list[np.ndarray], candidates: torch.Tensor) -> torch.Tensor:
        """Return scores, shape (users, candidates)."""
        counts = torch.tensor([len(items) for items in some])
        weights = counts.rsqrt().repeat_interleave(counts)
        known = torch.from_numpy(np.concatenate(some)), counts.cumsum(0) - counts, weights
        found = self.tables({"known": known, "items": candidates})
        users, items = found["known"], found["items"]
        return users @ items[:, :-1].T + items[:, -1]  # the last column is the item's own weight


def loss(
    model: Recommender, users: list[np.ndarray], drawn: np.ndarray, rng: np.random.Generator
) -> torch.Tensor:
    """Return how badly all calls of users are told from half of them."""
    some = [items[rng.permutation(len(items))[: (len(items) + 1) // 2]] for items in users]
    candidates, where = np.unique(np.concatenate([*users, drawn]), return_inverse=True)
    target = torch.zeros(len(users), len(candidates))
    rows = np.repeat(np.arange(len(users)), [len(items) for items in users])
    target[rows, where[: len(rows)]] = 1
    told = model(some, torch.from_numpy(candidates)).log_softmax(1)
    return -(target * told).sum() / target.sum()


# --- how good it is -----------------------------------------------------------------------------
def recall(
    score: Callable[[list[np.ndarray]], np.ndarray],
    users: list[np.ndarray],
    held_out: list[tuple[int, int]],
) -> float:
    """Return how often a held-out item is among the K that score highest, but for known ones."""
    n_found = 0
    for start in range(0, len(held_out), 256):
        part = held_out[start : start + 256]
        scores = score([users[user] for user, _ in part]).copy()
        for row, (user, item) in zip(scores, part, strict=True):
            row[users[user]] = -np.inf
            n_found += item in np.argpartition(-row, K)[:K]
    return n_found / len(held_out)


def item_knn(users: list[np.ndarray], n_items: int) -> Callable[[list[np.ndarray]], np.ndarray]:
    """Return the scores of item-kNN: cosines, shrunk by 5, which did best; of all neighbours."""
    calls = np.zeros((len(users), n_items), np.float32)
    for row, items in zip(calls, users, strict=True):
        row[items] = 1
    both = calls.T @ calls
    count = np.diag(both).copy()
    np.fill_diagonal(both, 0)
    near = both / (np.sqrt(np.outer(count, count)) + 5)
    return lambda some: np.array([near[items].sum(0) for items in some])


# --- the data -----------------------------------------------------------------------------------
def calls() -> tuple[list[np.ndarray], list[tuple[int, int]], int]:
    """Return items of each user, (user, held-out item), and how many items there are.

    Items are names that five functions call; users call two of them, of which four to be tested.
    """
    called = dict(names_called())
    count = Counter(name for names in called.values() for name in names)
    number = {name: i for i, name in enumerate(sorted(n for n, c in count.items() if c >= 5))}
    users, held_out = [], []
    for function, names in called.items():
        items = [number[name] for name in names if name in number]
        chance = zlib.crc32(function.encode())
        if len(items) >= 4 and chance % 2:
            held_out.append((len(users), items.pop(chance // 2 % len(items))))
        if len(items) >= 2:
            users.append(np.array(items))
    return users, held_out, len(number)


def names_called() -> list[tuple[str, list[str]]]:
    """Return each function of the standard library and the names that it calls, each once."""
    root = Path(sysconfig.get_path("stdlib"))
    found = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        if SKIPPED & set(place.parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = dict.fromkeys(name_of(each) for each in ast.walk(node))
                found.append((f"{place}:{node.lineno}", [name for name in names if name]))
    return found


def name_of(node: ast.AST) -> str:
    """Return the name that is called, "" if none is."""
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute):
        return called.attr
    return called.id if isinstance(called, ast.Name) else ""


if __name__ == "__main__":
    main()
