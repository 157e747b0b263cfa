"""Graph embeddings: each node of a graph has a row on the servers, and edges place these rows.

    ringcomm run -np 2 --servers 1 examples/ps_graph.py                   needs no torch
    RINGCOMM_PS_SERVERS=2 mpirun -np 4 python examples/ps_graph.py

Each worker has a share of the edges. For a batch of them it pulls the rows of their nodes, and of
pairs that are drawn at random. It pushes gradients that move the ends of an edge together, and
those of another pair apart. Each push is an update ("async").

The graph is made by chance. Its nodes are in ten communities, and two of the same one are more
often joined by an edge; which node is in which is told to nobody. The score is how often an edge
that was held out is rated above a pair that has none (AUC). It cannot be better than by looking at
the communities themselves, and the program compares with that.
"""

import numpy as np

import ringcomm as rc
from ringcomm import ps

NODES, COMMUNITIES = 2_000, 10
WITHIN, BETWEEN = 16, 4  # neighbours that a node has on average, in its community and in others
DIM, BATCH, EPOCHS = 16, 500, 12


def main() -> None:
    ps.init()
    edges, held_out, others, community = graph()
    start, adagrad = ps.initializers.normal(std=0.05, seed=7), ps.optim.Adagrad(0.05)
    nodes = ps.hashtable("nodes", DIM, init=start, updater=adagrad)
    mine, rng = edges[rc.rank() :: rc.size()], np.random.default_rng(rc.rank())
    for epoch in range(EPOCHS):
        rng.shuffle(mine)
        for begin in range(0, len(mine), BATCH):
            learn(nodes, mine[begin : begin + BATCH], rng)
        if ps.is_chief():
            score = auc(rated(nodes, held_out), rated(nodes, others))
            print(f"epoch {epoch + 1:2}/{EPOCHS}: AUC {score:.3f}", flush=True)
    rc.barrier()

    score = auc(rated(nodes, held_out), rated(nodes, others))
    best = auc(*(community[pairs[:, 0]] == community[pairs[:, 1]] for pairs in (held_out, others)))
    if ps.is_chief():
        print(
            f"{rc.size()} workers: AUC {score:.3f} of {len(held_out):,} edges; by the communities "
            f"{best:.3f}; {len(nodes):,} rows",
            flush=True,
        )
    # From half of the edges it is 0.73: who does not hear of the others' edges is found out.
    assert score > best - 0.05, f"AUC {score:.3f}, by the communities {best:.3f}"


def learn(nodes: ps.HashTable, edges: np.ndarray, rng: np.random.Generator) -> None:
    """Push the gradients of a logistic loss: edges are to be told from as many random pairs."""
    pairs = np.concatenate([edges, rng.integers(NODES, size=edges.shape)])
    rows = nodes.pull(pairs).wait()  # shape (pairs, 2, DIM)
    error = 1 / (1 + np.exp(-products(rows)))
    error[: len(edges)] -= 1
    nodes.push(pairs, error[:, None, None] * rows[:, ::-1])


def rated(nodes: ps.HashTable, pairs: np.ndarray) -> np.ndarray:
    return products(nodes.pull(pairs).wait())


def products(rows: np.ndarray) -> np.ndarray:
    """Return the scalar products of pairs of rows: the higher, the more like an edge."""
    return (rows[:, 0] * rows[:, 1]).sum(1)


def auc(edges: np.ndarray, others: np.ndarray) -> float:
    """Return how often an edge is rated above another pair; as high counts half."""
    others = np.sort(others)
    lower, not_higher = (np.searchsorted(others, edges, side) for side in ("left", "right"))
    return float((lower + not_higher).mean() / 2 / len(others))


def graph() -> tuple[np.ndarray, ...]:
    """Return edges to learn from, edges held out, as many other pairs, and each node's community.

    Pairs have shape (pairs, 2). It is the stochastic block model (Holland et al. 1983).
    """
    rng = np.random.default_rng(1)
    community = rng.integers(COMMUNITIES, size=NODES)
    is_same = community[:, None] == community
    chance = np.where(is_same, WITHIN, BETWEEN / (COMMUNITIES - 1)) * COMMUNITIES / NODES
    is_edge, is_pair = rng.random((NODES, NODES)) < chance, np.triu(np.ones_like(is_same), 1)
    edges = rng.permutation(np.argwhere(is_edge & is_pair))
    n = len(edges) // 10
    others = rng.choice(np.argwhere(~is_edge & is_pair), n, replace=False)
    return edges[n:], edges[:n], others, community


if __name__ == "__main__":
    main()
