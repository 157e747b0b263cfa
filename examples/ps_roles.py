"""The classic cluster: servers, workers of which one is the chief, and an evaluator.

    mpirun --oversubscribe -np 13 python examples/ps_roles.py    4 servers, 8 workers, 1 evaluator
    mpirun -np 3 python examples/ps_roles.py --steps 100 --checkpoints run
    mpirun -np 4 python examples/ps_roles.py --restore run       goes on at step 100
    mpirun -np 4 python examples/ps_roles.py --pretrained run    begins with those values, at step 0

Any number of ranks from 2 on is divided in this way. The parameters are tables of the servers,
which make Adam's updates. Ranks differ in three places: ps.init() returns on workers alone; the
chief saves and prints; and evaluate() sees all tables between the same two rounds while the workers
go on. With rounds ("sync"), a restored run ends with the same bits as one that was not
interrupted. The data are scikit-learn's digits: 1,797 real scans of 8 x 8 pixels.
"""

import argparse
import functools
import importlib.util
import zlib
from pathlib import Path

import numpy as np

import ringcomm as rc
from ringcomm import ps

HIDDEN, GLOBAL_BATCH = 64, 256
EVALUATE_EVERY, SAVE_EVERY = 50, 50


def main() -> None:
    args = arguments()
    rc.init()
    servers, evaluators = roles(rc.size())
    ps.evaluator(every=EVALUATE_EVERY)(evaluate)
    ps.init(servers, evaluators=evaluators)  # from here on: workers

    tables = parameters()
    start = begin(args)
    images, labels = digits("train")
    values = pulled(tables)
    for step in range(start, args.steps):
        mine = np.random.default_rng(step).permutation(len(labels))[:GLOBAL_BATCH]
        mine = mine[rc.rank() :: rc.size()]
        gradients = gradients_of(values, images[mine], labels[mine])
        for name, table in tables.items():
            table.push(gradients[name], weight=len(mine))
        values = pulled(tables)  # waits for the round: the mean over all workers
        ps.complete_step(step + 1)
        if ps.is_chief():
            if step % 25 == 0:
                print(f"step {step} of {args.steps}", flush=True)
            tell(ps.reports())
            if args.checkpoints and (step + 1) % SAVE_EVERY == 0:
                ps.save(args.checkpoints, step=step + 1)

    if ps.is_chief():
        finish(values, args, start, n_servers=servers, n_evaluators=evaluators)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--goal", type=float, default=0.95, help="accuracy to be reached")
    parser.add_argument("--checkpoints", help="folder to save to")
    parser.add_argument("--restore", help="folder of checkpoints to go on from")
    parser.add_argument("--pretrained", help="folder of checkpoints to take values from")
    return parser.parse_args()


def roles(n: int) -> tuple[int, int]:
    """Return how many of n ranks serve, and how many evaluate: of 13 four and one."""
    return max(1, n // 3), int(n >= 3)


def begin(args: argparse.Namespace) -> int:
    """Let the servers have what a checkpoint says; return the step to go on from. Collective."""
    start = 0
    if ps.is_chief() and args.restore:
        manifest = ps.restore(args.restore)
        if manifest is None:
            raise FileNotFoundError(f"no checkpoint in {args.restore}")
        start = manifest["step"]
        rounds = set(manifest["rounds"].values())
        assert rounds == {start}, f"saved after step {start}, with the rounds {rounds}"
        print(f"goes on at step {start}", flush=True)
    if ps.is_chief() and args.pretrained:
        print(f"begins with the values of step {ps.load(args.pretrained)['step']}", flush=True)
    start = rc.broadcast_object(start)  # nobody pulls before
    ps.complete_step(start)
    return start


def evaluate(step: int) -> None:
    """Report how good the parameters are; runs on the evaluator, in a snapshot."""
    values = pulled(parameters())
    ps.report(step, {"accuracy": accuracy(values), "seen": fingerprint(values)})


def tell(reports: list[ps.Report]) -> None:
    for each in reports:
        print(
            f"step {each.step}: accuracy {each.metrics['accuracy']:.2%}, says rank {each.rank}",
            flush=True,
        )


def finish(
    values: dict[str, np.ndarray],
    args: argparse.Namespace,
    start: int,
    *,
    n_servers: int,
    n_evaluators: int,
) -> None:
    """Compare what the chief has with what the evaluator has seen."""
    found = accuracy(values)
    if n_evaluators and start < args.steps and args.steps % EVALUATE_EVERY == 0:
        reports = ps.reports(until=args.steps)
        tell(reports)
        assert reports[-1].metrics == {"accuracy": found, "seen": fingerprint(values)}
    print(
        f"workers {rc.size()}, servers {n_servers}, evaluators {n_evaluators}, steps {args.steps}: "
        f"accuracy {found:.2%}, parameters {fingerprint(values):08x}",
        flush=True,
    )
    assert found >= args.goal, f"accuracy {found:.2%} is below {args.goal:.0%}"


# --- the model ----------------------------------------------------------------------------------
def parameters() -> dict[str, ps.Table]:
    """Open the tables; the chief's values are what they begin with."""
    rng = np.random.default_rng(0)
    initial = {
        "w1": rng.normal(0, 64**-0.5, (64, HIDDEN)),
        "b1": np.zeros(HIDDEN),
        "w2": rng.normal(0, HIDDEN**-0.5, (HIDDEN, 10)),
        "b2": np.zeros(10),
    }
    return {
        name: ps.table(
            name,
            init.shape,
            updater=ps.optim.Adam(5e-3),
            mode="sync",
            init=init,
            block_nbytes=4096,  # small, so that four servers have a share each
        )
        for name, init in initial.items()
    }


def pulled(tables: dict[str, ps.Table]) -> dict[str, np.ndarray]:
    futures = {name: table.pull() for name, table in tables.items()}
    return {name: future.wait() for name, future in futures.items()}


def forward(values: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return what the hidden layer says, and the scores of the classes."""
    hidden = np.maximum(x @ values["w1"] + values["b1"], 0)
    return hidden, hidden @ values["w2"] + values["b2"]


def gradients_of(
    values: dict[str, np.ndarray], x: np.ndarray, labels: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the gradients of the mean cross entropy."""
    hidden, scores = forward(values, x)
    error = np.exp(scores - scores.max(1, keepdims=True))
    error /= error.sum(1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    error /= len(labels)
    back = error @ values["w2"].T * (hidden > 0)
    return {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}


def accuracy(values: dict[str, np.ndarray]) -> float:
    images, labels = digits("test")
    return float((forward(values, images)[1].argmax(1) == labels).mean())


def fingerprint(values: dict[str, np.ndarray]) -> int:
    return zlib.crc32(b"".join(values[name].tobytes() for name in sorted(values)))


@functools.cache
def digits(part: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images and labels; every fifth is to test with.

    From scikit-learn's file: to import it takes as long as the whole training, on each rank.
    """
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or sklearn.origin is None:
        raise ModuleNotFoundError("the digits are scikit-learn's: pip install scikit-learn")
    path = Path(sklearn.origin).parent / "datasets" / "data" / "digits.csv.gz"
    data = np.loadtxt(path, delimiter=",")
    images, labels = data[:, :-1], data[:, -1].astype(int)
    is_test = np.arange(len(labels)) % 5 == 0
    mine = is_test if part == "test" else ~is_test
    return (images[mine] / 16).astype(np.float32), labels[mine]


if __name__ == "__main__":
    main()
