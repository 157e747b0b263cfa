"""The agreement: the round of messages in which the ranks of a group compare their calls.

Each rank sends ceil(log2 size) messages with its fingerprint, a flag (all known fingerprints are
equal) and the largest known proposal. If fingerprints differ, the ranks exchange whole calls.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.algorithms import circulant, linear, node, tree
from ringcomm.collectives.message_patterns import consecutive, dissemination_steps
from ringcomm.collectives.recording import perform
from ringcomm.engine.core.call import Call, are_wrong_alike, explain_mismatch
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel
from ringcomm.transport.control_header import ControlKind


class Agreement(NamedTuple):
    """The result of an agreement, the same on all ranks."""

    is_agreed: bool  # all ranks make the same call
    value: int  # the largest proposal
    in_use: int  # the bits that at least one rank passed as in_use


async def agree(fingerprint: int, proposal: int, t: Channel, *, in_use: int = 0) -> Agreement:
    """Return the verdict once every rank has entered this operation, as in a barrier."""
    all_agree, value = True, proposal
    with t.phase("negotiation"):
        for round_, (dest, source) in enumerate(dissemination_steps(t.rank, t.size)):
            t.tell(
                dest,
                ControlKind.AGREE,
                f"{in_use:x}" if in_use else "",
                key=t.key,
                fingerprint=fingerprint,
                value=value,
                flag=all_agree,
                round=round_,
            )
            letter = await t.hear(ControlKind.AGREE, t.key, source, round_)
            heard = letter.header
            assert heard is not None
            all_agree = all_agree and heard.flag and heard.fingerprint == fingerprint
            value = max(value, heard.value)
            if letter.text:
                in_use |= int(letter.text, 16)
    return Agreement(all_agree, value, in_use)


async def mismatch(
    call: Call,
    number: int,
    t: Channel,
    *,
    has_moved: bool = False,
    problem: Exception | None = None,
) -> Exception:
    """Return the error that names the call of each rank, the same error on all ranks.

    If all ranks have a problem of one kind, such as splits that are no integers, each gets its own.
    `t` carries nothing but calls. For number and has_moved see explain_mismatch().
    """
    calls = [Call.unpack(each) for each in await gather_bytes(call.pack(), t)]
    if problem is not None and are_wrong_alike(calls):
        return problem
    error = MismatchError(explain_mismatch(calls, number, t.members, has_moved=has_moved))
    error.__cause__ = problem
    return error


async def gather_counts(count: int, t: Channel) -> list[int]:
    counts = np.zeros(t.size, np.int64)
    counts[t.rank] = count
    whole = Flat(counts.view(np.uint8), DTYPES["int64"])
    await perform(node_or(circulant, t).allgather_, t, whole, consecutive([1] * t.size))
    return [int(n) for n in counts]


async def gather_bytes(mine: bytes, t: Channel) -> list[bytes]:
    return await _gathered(mine, consecutive(await gather_counts(len(mine), t)), t)


async def gather_alike(mine: bytes, t: Channel) -> list[bytes]:
    """Return every rank's bytes. All ranks pass equally many; if that is 0, return [] at once."""
    return await _gathered(mine, consecutive([len(mine)] * t.size), t) if mine else []


async def _gathered(mine: bytes, parts: list[slice], t: Channel) -> list[bytes]:
    everything = Flat(np.empty(parts[-1].stop, np.uint8), DTYPES["uint8"])
    everything[parts[t.rank]].bytes[:] = np.frombuffer(mine, np.uint8)
    await perform(node_or(circulant, t).allgather_, t, everything, parts)
    return [everything[part].bytes.tobytes() for part in parts]


async def broadcast_bytes(packed: bytes, root: int, t: Channel) -> bytes:
    """Return root's bytes; the other ranks need not know how many there are."""
    nbytes = np.array([len(packed)], np.int64)
    algorithm = node_or(tree, t)
    await perform(algorithm.broadcast_, t, Flat(nbytes.view(np.uint8), DTYPES["int64"]), root)
    is_root = t.rank == root
    data = np.frombuffer(packed, np.uint8) if is_root else np.empty(nbytes[0], np.uint8)
    await perform(algorithm.broadcast_, t, Flat(data, DTYPES["uint8"]), root)
    return data.tobytes()


async def gather_bytes_at(mine: bytes, root: int, t: Channel) -> list[bytes]:
    """Return every rank's bytes on root, [] elsewhere."""
    parts = consecutive(await gather_counts(len(mine), t))
    own = Flat(np.frombuffer(mine, np.uint8), DTYPES["uint8"])
    if t.rank != root:
        await perform(node_or(linear, t).gather_, t, None, own, parts, root)
        return []
    everything = Flat(np.empty(parts[-1].stop, np.uint8), DTYPES["uint8"])
    everything[parts[root]].bytes[:] = own.bytes
    await perform(node_or(linear, t).gather_, t, everything, own, parts, root)
    return [everything[part].bytes.tobytes() for part in parts]


async def scatter_bytes(packed: list[bytes], root: int, t: Channel) -> bytes:
    """Return packed[rank] of root; the other ranks pass []."""
    counts = np.array([len(each) for each in packed], np.int64).tobytes()
    parts = consecutive(np.frombuffer(await broadcast_bytes(counts, root, t), np.int64).tolist())
    part = parts[t.rank]
    out = Flat(np.empty(part.stop - part.start, np.uint8), DTYPES["uint8"])
    everything = None
    if t.rank == root:
        everything = Flat(np.frombuffer(b"".join(packed), np.uint8), DTYPES["uint8"])
    await perform(node_or(linear, t).scatter_, t, everything, out, parts, root)
    return out.bytes.tobytes()


def node_or(otherwise: Any, t: Channel) -> Any:
    return otherwise if t.meeting is None else node
