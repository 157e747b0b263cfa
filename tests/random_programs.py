"""Random programs of collectives and messages, and what numpy says their results are.

A program is the same on every rank but for the order in which named operations are started. Values
are small integers, so every result is exact in every dtype.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

import ringcomm as rc

FLOATS = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
OTHERS = [np.bool_, np.complex64, np.complex128]
REDUCTIONS = ["allreduce", "allreduce_", "reduce", "reduce_scatter", "grouped_allreduce"]
SCANS = ["scan", "exscan"]
# One rank to another; all others to a root, which takes them from anyone; each to the next.
MESSAGES = ["message", "to_root", "shift"]
TAGS = [0, 0, 7, -1, 1 << 40]
# Short messages are passed on whole, long ones read, or cut into pieces, or sent by the wire; see
# csrc/p2p/peer_messages.cpp.
NBYTES = [0, 8, (16 << 10) - 1, 16 << 10, (16 << 10) + 1, 300_007, 1 << 20]
KINDS = [
    *MESSAGES,
    "message",
    *REDUCTIONS,
    *SCANS,
    "broadcast",
    "broadcast_",
    "allgather",
    "gather",
    "scatter",
    "alltoall",
]
OPS = {
    rc.SUM: lambda a: a.sum(0),
    rc.MIN: lambda a: a.min(0),
    rc.MAX: lambda a: a.max(0),
    rc.PRODUCT: lambda a: a.prod(0),
    rc.AVERAGE: lambda a: a.sum(0) / len(a),
    rc.BAND: np.bitwise_and.reduce,
    rc.BOR: np.bitwise_or.reduce,
    rc.BXOR: np.bitwise_xor.reduce,
}
BITWISE = (rc.BAND, rc.BOR, rc.BXOR)
OF_NUMBERS = ["allreduce", "reduce", *SCANS, "broadcast", "gather"]
OF_PYTHON = [np.bool_, np.int64, np.float64, np.complex128]  # dtypes of its numbers


@dataclass(frozen=True)
class Operation:
    """A collective or messages; `members` are ranks of the job, `group` an index, None for all."""

    number: int
    kind: str
    dtype: object
    shape: tuple
    op: object
    root: int
    group: int | None
    members: tuple
    name: str | None
    is_async: bool
    is_deterministic: bool
    is_number: bool  # of Python or numpy, not an array
    dest: int = 0  # index of who receives a message; `root` sends it
    tag: int = 0

    def argument(self, rank, shape=None):
        """Return what `rank` passes; arrays of one program differ by operation and rank."""
        rng = np.random.default_rng([self.number, rank])
        high = 2 if self.op is rc.PRODUCT or self.dtype is np.bool_ else 4
        return np.asarray(rng.integers(0, high, self.shape if shape is None else shape), self.dtype)

    def rows(self, rank):
        """Return the shape that `rank` passes to operations that allow another number of rows."""
        if self.is_number:
            return (1,)
        return ((self.number + rank) % 4, *self.shape[1:])


def make_program(seed, size, n_operations=25):
    """Return (groups, segments): lists of operations that may be in flight together."""
    rng = random.Random(seed)
    groups = [
        tuple(rng.sample(range(size), rng.randint(1, size))) for _ in range(rng.randint(0, 4))
    ]
    segments, made = [], []
    while len(made) < n_operations:
        segment = []
        for _ in range(rng.randint(1, 6)):
            new = _operation(rng, len(made), size, groups)
            if made and rng.random() < 0.5:
                new = _made_again(rng.choice(made[-3:]), len(made))
            segment.append(new)
            made.append(new)
        segments.append(segment)
    return groups, segments


def _made_again(before, number):
    """Return a short call, from the third time on; the values, and rows of other ranks, differ."""
    return replace(before, number=number, name=None, is_async=False, is_deterministic=False)


def _operation(rng, number, size, groups):
    kind = rng.choice(KINDS)
    if kind in MESSAGES:
        return _message(rng, kind, number, size, groups)
    dtype = rng.choice(FLOATS + INTEGERS + OTHERS)
    shape = tuple(rng.choice([0, 1, 2, 3, 7, 40]) for _ in range(rng.randint(0, 3)))
    if kind in ("reduce_scatter", "allgather", "gather", "scatter", "alltoall") and not shape:
        shape = (5,)
    group = rng.choice([None, None, *range(len(groups))])
    members = tuple(range(size)) if group is None else groups[group]
    name = rng.choice([None, f"op {number}", f"again {number % 2}"])
    is_repeated = name is not None and name.startswith("again")
    if is_repeated:  # one call under one name: agreed on once, then cached
        kind, dtype, shape = "allreduce", np.float32, (33,)
    op = rng.choice(_ops_of(dtype)) if kind in (*REDUCTIONS, *SCANS) else None
    if kind in SCANS and op is rc.AVERAGE:
        op = rc.SUM
    is_number = kind in OF_NUMBERS and not is_repeated and rng.random() < 0.2
    return Operation(
        number,
        kind,
        dtype,
        () if is_number else shape,
        rc.SUM if is_repeated else op,
        rng.randrange(len(members)),
        group,
        members,
        name,
        is_async=rng.random() < 0.7,
        is_deterministic=rng.random() < 0.3 and not is_repeated,
        is_number=is_number,
    )


def _message(rng, kind, number, size, groups):
    nbytes = rng.choice(NBYTES)
    dtype = np.uint8 if nbytes % 2 else rng.choice([np.uint8, np.float16, np.int64, np.bool_])
    group = rng.choice([None, *range(len(groups))])
    members = tuple(range(size)) if group is None else groups[group]
    root = rng.randrange(len(members))
    return Operation(
        number,
        kind,
        dtype,
        (nbytes // np.dtype(dtype).itemsize,),
        None,
        root,
        group,
        members,
        None,
        is_async=rng.random() < 0.5,
        is_deterministic=False,
        is_number=False,
        dest=(root + rng.randrange(1, len(members))) % len(members) if len(members) > 1 else 0,
        tag=rng.choice(TAGS),
    )


def _ops_of(dtype):
    if dtype in (np.complex64, np.complex128):
        return [rc.SUM, rc.PRODUCT, rc.AVERAGE]
    if dtype is np.bool_:
        return [rc.SUM, rc.PRODUCT, rc.MIN, rc.MAX, *BITWISE]
    if dtype in INTEGERS:
        return list(OPS)
    return [rc.SUM, rc.PRODUCT, rc.MIN, rc.MAX, rc.AVERAGE]


class Library:
    """Whose arrays are passed: numpy's own."""

    def of(self, x):
        """Return what is passed for a numpy array."""
        return x

    def read(self, x):
        """Return the numpy array of what was passed, or came back."""
        return x


def run_program(program, rank, seed, library=None):
    """Run this rank's part; raises AssertionError with the operation whose result is wrong."""
    library = library or Library()
    ranks_of_groups, segments = program
    groups = [_group(ranks, rank, (seed + i) % 2) for i, ranks in enumerate(ranks_of_groups)]
    rng = random.Random(f"{seed} {rank}")
    for segment in segments:
        mine = [op for op in segment if rank in op.members]
        _run_segment(_own_order(mine, rng), groups, rank, rng, library)


def _group(ranks, rank, is_split):
    if is_split:
        return rc.split(*((3, ranks.index(rank)) if rank in ranks else (None, None)))
    return rc.Group(ranks) if rank in ranks else None


def _own_order(operations, rng):
    """Return them shuffled, but in their order: unnamed ones, messages, and those of one name."""
    order = list(operations)
    rng.shuffle(order)
    lanes = {}
    for op in operations:
        lanes.setdefault(_lane(op), []).append(op)
    return [lanes[_lane(op)].pop(0) for op in order]


def _lane(op):
    return (op.group, op.name, op.kind in MESSAGES)


def _run_segment(operations, groups, rank, rng, library):
    """Start all, each name once at a time, and wait in another order.

    Ranks differ in what they start first, so whatever blocks comes after all that does not.
    """
    handles, later, names = [], [], set()
    for op in operations:
        is_pending = op.name is not None and (op.group, op.name) in names
        if is_pending or not op.is_async:
            later.append(op)
            continue
        names.add((op.group, op.name))
        x = _passed(op, rank) if op.is_number else _each(library.of, _passed(op, rank))
        handles.append((op, x, _call(op, x, groups, library, "async")))
    rng.shuffle(handles)
    for op, x, handle in handles:
        check(op, rank, x, handle.wait(), library)
    for op in sorted(later, key=lambda op: op.number):
        x = _passed(op, rank) if op.is_number else _each(library.of, _passed(op, rank))
        check(op, rank, x, _call(op, x, groups, library, "sync"), library)


def _passed(op, rank):
    if op.is_number:
        x = op.argument(rank)
        return x.item() if op.dtype in OF_PYTHON and op.number % 2 else x[()]
    if op.kind in ("allgather", "gather"):
        return op.argument(rank, op.rows(rank))
    if op.kind == "alltoall":
        return op.argument(rank, (sum(_splits(op, rank)), *op.shape[1:]))
    if op.kind == "grouped_allreduce":
        return [op.argument(rank), op.argument(rank, (3,))]
    if op.kind == "scatter" and op.members[op.root] != rank:
        return None
    return op.argument(rank)


def _is_even(op):
    return op.name is None and not op.is_async


def _splits(op, rank):
    if _is_even(op):
        return [(op.number + rank) % 3] * len(op.members)
    return [(op.number + rank + 2 * dest) % 3 for dest in op.members]


def _call(op, x, groups, library, form):
    group = None if op.group is None else groups[op.group]
    if op.kind in MESSAGES:
        return _pass_messages(op, x, group, library, form)
    name = op.kind
    if form == "async":
        name = f"{name[:-1]}_async_" if name.endswith("_") else f"{name}_async"
    call = getattr(rc, name)
    options = {"name": op.name, "group": group}
    if op.kind in REDUCTIONS:
        options["deterministic"] = op.is_deterministic
        if op.kind == "reduce":
            return call(x, op.op, op.root, **options)
        return call(x, op.op, **options)
    if op.kind in SCANS:
        return call(x, op.op, **options)
    if op.kind == "alltoall":
        if _is_even(op):
            return call(x, **options)
        return call(x, _splits(op, rc.rank()), **options)
    if op.kind == "allgather":
        return call(x, **options)
    return call(x, op.root, **options)


@dataclass(frozen=True)
class Received:
    """Messages that come: of each the array, and its handle or who has sent it."""

    sends: list
    receives: list

    def wait(self):
        for handle in self.sends:
            handle.wait()
        return [(handle.wait(), out) for handle, out in self.receives]


def _pass_messages(op, x, group, library, form):
    """Return (sender, array) of each message that came; to wait for if the form is async."""
    me = op.members.index(rc.rank())
    to, sources = _mates(op, me)
    outs = [library.of(np.zeros(op.shape, op.dtype)) for _ in sources]
    tag = _tag(op)
    options = {"tag": tag, "group": group}
    if form == "async":
        sends = [rc.isend(x, dest, **options) for dest in to]
        receives = [
            (rc.irecv(out, source, **options), out)
            for source, out in zip(sources, outs, strict=True)
        ]
        return Received(sends, receives)
    if op.kind == "shift":
        options = {"sendtag": tag, "recvtag": tag, "group": group}
        return [(rc.sendrecv(x, *to, *outs, *sources, **options), *outs)]
    for dest in to:
        rc.send(x, dest, **options)
    return [
        (rc.recv(out, source, **options), out) for source, out in zip(sources, outs, strict=True)
    ]


def _mates(op, me):
    """Return the members to which one sends, and those from which it receives."""
    n = len(op.members)
    if op.kind == "shift":
        return [(me + 1) % n], [(me - 1) % n]
    if op.kind == "to_root":
        return ([], [rc.ANY_SOURCE] * (n - 1)) if me == op.root else ([op.root], [])
    if op.root == op.dest:  # there is one member
        return [], []
    return [op.dest] * (me == op.root), [op.root] * (me == op.dest)


def _tag(op):
    return 1000 + op.number if op.kind == "to_root" else op.tag  # anyone's other ones do not fit


def _check_messages(op, me, received):
    senders = [source for source, _ in received]
    _, sources = _mates(op, me)
    if op.kind == "to_root" and me == op.root:
        sources = [source for source in range(len(op.members)) if source != me]
    assert sorted(senders) == sorted(sources), (op, senders)
    for source, x in received:
        _same(op, x, op.argument(op.members[source]))


def _each(change, x):
    if isinstance(x, list):
        return [change(each) for each in x]
    return None if x is None else change(x)


def check(op, rank, passed, returned, library=None):
    """Compare with numpy, bit by bit."""
    library = Library() if op.is_number else library or Library()
    x = _each(library.read, passed)
    if not op.kind.endswith("_"):
        assert _alike(x, _passed(op, rank)), op  # what is passed in is left alone
    if op.kind in MESSAGES:
        came = [(source, library.read(out)) for source, out in returned]
        _check_messages(op, op.members.index(rank), came)
        return
    result, want = _each(library.read, returned), _expected(op, rank)
    if isinstance(want, list):
        assert len(result) == len(want), op
        for each, wanted in zip(result, want, strict=True):
            _same(op, each, wanted)
        return
    if want is None:
        assert result is None, op
        return
    if op.is_number and want.ndim == 0:
        assert type(result) is type(x), op
        result = np.asarray(result)
    _same(op, result, want)
    if op.kind.endswith("_"):
        assert returned is passed, op


def _alike(x, y):
    if isinstance(x, list):
        return all(map(np.array_equal, x, y))
    return x is y if x is None else np.array_equal(x, y)


def _same(op, result, want):
    assert result.dtype == want.dtype, (op, result.dtype)
    assert result.shape == want.shape, (op, result.shape, want.shape)
    assert np.array_equal(result, want), (op, result, want)


def _expected(op, rank):
    root = op.members[op.root]
    index = op.members.index(rank)
    if op.kind in REDUCTIONS:
        return _reduced(op, rank, root, index)
    if op.kind in SCANS:
        n = index + (op.kind == "scan")
        return _combined(op, None, op.members[:n]) if n else _first_of_exscan(op)
    if op.kind.startswith("broadcast"):
        return op.argument(root)
    if op.kind in ("allgather", "gather"):
        if op.kind == "gather" and rank != root:
            return None
        return np.concatenate([op.argument(r, op.rows(r)) for r in op.members])
    if op.kind == "scatter":
        return np.array_split(op.argument(root), len(op.members))[index]
    parts = []
    for source in op.members:
        sent = _splits(op, source)
        rows = op.argument(source, (sum(sent), *op.shape[1:]))
        start = sum(sent[:index])
        parts.append(rows[start : start + sent[index]])
    return np.concatenate(parts)


def _reduced(op, rank, root, index):
    if op.kind == "grouped_allreduce":
        return [_combined(op, None), _combined(op, (3,))]
    total = _combined(op, None)
    if op.kind == "reduce":
        return total if rank == root else None
    if op.kind == "reduce_scatter":
        return np.array_split(total, len(op.members))[index]
    return total


def _first_of_exscan(op):
    if op.op in (rc.MIN, rc.MAX):
        lowest, highest = (False, True) if op.dtype is np.bool_ else (-np.inf, np.inf)
        if op.dtype in INTEGERS:
            lowest, highest = np.iinfo(op.dtype).min, np.iinfo(op.dtype).max
        return np.full(op.shape, highest if op.op is rc.MIN else lowest).astype(op.dtype)
    one = -1 if op.op is rc.BAND else int(op.op is rc.PRODUCT)
    return np.full(op.shape, one).astype(op.dtype)


def _combined(op, shape, members=None):
    stack = np.stack([op.argument(r, shape) for r in members or op.members])
    wide = stack
    if op.dtype is np.bool_:
        wide = stack if op.op in BITWISE else stack.astype(np.int64)
    elif op.dtype in FLOATS:
        wide = stack.astype(np.float64)
    elif op.dtype in INTEGERS and op.op not in BITWISE:
        wide = stack.astype(object) if stack.size == 0 else stack.astype(np.int64)
    if stack.size == 0:
        return np.zeros(stack.shape[1:], op.dtype)
    result = OPS[op.op](wide)
    if op.op is rc.AVERAGE:
        result = _averaged(op, wide)
    return np.asarray(result).astype(op.dtype)


def _averaged(op, wide):
    """Divide as the contract says: truncated for integers, in float32 for 16-bit floats."""
    total = wide.sum(0)
    if op.dtype in INTEGERS:
        return total // len(wide)  # values are not negative
    if op.dtype in (np.float32, np.float16, ml_dtypes.bfloat16):
        return total.astype(np.float32) / np.float32(len(wide))
    if op.dtype in OTHERS:  # numpy's complex division is not correctly rounded
        size = np.ones(1, op.dtype).real.dtype.type(len(wide))
        return total.real / size + 1j * (total.imag / size)
    return total / len(wide)
