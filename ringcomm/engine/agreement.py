"""The round in which all ranks agree on what they are about to do, before any payload moves.

ceil(log2 size) messages of 32 bytes per rank: each rank passes on its fingerprint, and whether all
that it has heard of agree. Only a disagreement costs more: then the calls themselves go round.
"""

from __future__ import annotations

import numpy as np

from ringcomm.arrays import DTYPES, Flat
from ringcomm.collectives.ring import allgather_
from ringcomm.collectives.schedule import consecutive, dissemination_steps
from ringcomm.engine.call import Call, explain_mismatch
from ringcomm.errors import MismatchError
from ringcomm.transport.channel import Channel
from ringcomm.transport.header import NBYTES, Header, Kind


def agree(call: Call, t: Channel) -> None:
    """Return when every rank is known to make the same call; a barrier, too.

    Raises:
        MismatchError: the same on every rank, with the values that differ.
    """
    sequence = t.operation.sequence
    mine = call.fingerprint()
    all_agree = True
    theirs = np.empty(NBYTES, np.uint8)
    for dest, source in dissemination_steps(t.rank, t.size):
        header = Header(
            Kind.AGREE,
            t.transport.ring_epoch,
            t.transport.incarnation,
            sequence,
            fingerprint=mine,
            flag=all_agree,
        )
        t.exchange(np.frombuffer(header.pack(), np.uint8), dest, theirs, source)
        heard, _ = Header.unpack(theirs.tobytes())
        all_agree = all_agree and heard.flag and _matches(heard, mine, sequence)
    if not all_agree:
        raise MismatchError(explain_mismatch(_everybodys(call, t), sequence))


def _matches(heard: Header, fingerprint: int, sequence: int) -> bool:
    return heard.fingerprint == fingerprint and heard.sequence == sequence


def _everybodys(call: Call, t: Channel) -> list[Call]:
    packed = gather_bytes(call.pack(), t)
    return [Call.unpack(each) for each in packed]


def gather_counts(count: int, t: Channel) -> list[int]:
    """Return every rank's count."""
    counts = np.zeros(t.size, np.int64)
    counts[t.rank] = count
    one_each = consecutive([1] * t.size)
    allgather_(Flat(counts.view(np.uint8), DTYPES["int64"]), one_each, t)
    return [int(n) for n in counts]


def gather_bytes(mine: bytes, t: Channel) -> list[bytes]:
    """Return every rank's bytes, in rank order."""
    parts = consecutive(gather_counts(len(mine), t))
    everything = Flat(np.empty(parts[-1].stop, np.uint8), DTYPES["uint8"])
    everything[parts[t.rank]].bytes[:] = np.frombuffer(mine, np.uint8)
    allgather_(everything, parts, t)
    return [everything[part].bytes.tobytes() for part in parts]
