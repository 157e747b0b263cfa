"""Train a small language model whose embedding lives on the servers, by the ring for the rest.

    mpirun -np 3 python examples/ps_text.py                              two workers and one server
    RINGCOMM_PS_SERVERS=2 mpirun -np 4 python examples/ps_text.py --steps 300

The model predicts a character from the 1, 2, ... 6 before it; each such context is the id of a row.
There is no vocabulary. Any 63-bit number is an id, and a row is made when its context has come up
often enough. Workers pull and push only the rows of their batch. With hybrid="ring", the gradients
of the other layers are reduced by the ring. The text is Python's own documentation.
"""

import argparse
import pydoc_data.topics
import zlib

import numpy as np
import torch
from torch import nn

import ringcomm as rc
from ringcomm.torch import ps

ORDERS, DIM, HIDDEN, BATCH = 6, 32, 192, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    args = parser.parse_args()

    ps.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the ring's optimizer gives all workers the same first weights
    train, test = texts()
    model = LanguageModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters(), hybrid="ring")

    rng = np.random.default_rng(rc.rank())
    for step in range(args.steps):
        at = rng.integers(ORDERS, len(train), BATCH)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(contexts(train, at)), symbols(train, at))
        loss.backward()
        optimizer.step()
        if ps.is_chief() and step % 10 == 0:
            print(f"step {step:3}/{args.steps}  {loss.item():.3f} nats per character", flush=True)

    if ps.is_chief():
        print("reading other topics", flush=True)
    loss = held_out_loss(model, test)
    unigram, bigram = baselines(train, test)
    if ps.is_chief():
        print(
            f"{rc.size()} workers: {loss:.3f} nats per character of other topics; by its frequency "
            f"{unigram:.3f}, by the character before {bigram:.3f}; {len(model.rows.table):,} rows",
            flush=True,
        )
    assert loss < bigram - 0.3 < unigram, f"{loss:.3f} nats, bigrams {bigram:.3f}"


class LanguageModel(nn.Module):
    """Scores of the next character from rows of the contexts before it."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = ps.Embedding(
            None,
            DIM,
            name="contexts",
            init=ps.initializers.normal(std=0.05, seed=7),
            optimizer=ps.optim.Adagrad(0.1),
            admit=ps.Admit(min_count=2),
            mode="sync",
        )
        self.layers = nn.Sequential(
            nn.Linear(ORDERS * DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 256)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(self.rows(ids).flatten(1))


def held_out_loss(model: nn.Module, test: np.ndarray) -> float:
    """Return nats per character; each worker reads a part of the text."""
    mine = np.array_split(np.arange(ORDERS, len(test)), rc.size())[rc.rank()]
    total = 0.0
    with torch.no_grad():
        for at in np.array_split(mine, max(1, len(mine) // 4096)):
            scores = model(contexts(test, at))
            total += nn.functional.cross_entropy(scores, symbols(test, at), reduction="sum").item()
    return rc.allreduce(np.array([total])).item() / (len(test) - ORDERS)


# --- the data -----------------------------------------------------------------------------------
def texts() -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of topics to learn from, and of a tenth of them to test with."""
    parts: list[list[bytes]] = [[], []]
    for name, text in sorted(pydoc_data.topics.topics.items()):
        parts[zlib.crc32(name.encode()) % 10 == 0].append(text.encode())
    train, test = (np.frombuffer(b"\n".join(part), np.uint8) for part in parts)
    return train, test


def contexts(text: np.ndarray, at: np.ndarray) -> torch.Tensor:
    """Return ids of what stands before these places, shape (places, ORDERS): 1 character, 2, ..."""
    ids = np.empty((len(at), ORDERS), np.int64)
    seen = np.zeros(len(at), np.int64)
    for order in range(1, ORDERS + 1):
        seen = seen << 8 | text[at - order]
        ids[:, order - 1] = order << 56 | seen
    return torch.from_numpy(ids)


def symbols(text: np.ndarray, at: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(text[at].astype(np.int64))


def baselines(train: np.ndarray, test: np.ndarray) -> tuple[float, float]:
    """Return nats per character of frequencies, and of those after each character."""
    ones = np.bincount(train, minlength=256) + 1
    alone = ones / ones.sum()
    pairs = np.tile(alone, (256, 1))  # a pair that never came is predicted by its second alone
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    after = pairs / pairs.sum(1, keepdims=True)
    nats = -np.log(alone[test[1:]]), -np.log(after[test[:-1], test[1:]])
    return float(nats[0].mean()), float(nats[1].mean())


if __name__ == "__main__":
    main()
