"""Compares the weights with which ranks begin; where they differ, all get the first rank's.

Compared once, by a fingerprint that travels with what ranks compare before the first gradient
anyway. Nothing is logged where broadcast_parameters() has made ranks alike.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from ringcomm.collectives.op import BOR
from ringcomm.engine.api import collectives
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.torch.backward.complement import is_alike, with_complement
from ringcomm.torch.backward.cooperative_finish import CollectiveTask, finish_together

Named = Sequence[tuple[str, torch.Tensor]]
Sums = tuple[int, int]

_NBYTES: Final = 16
_NOTHING: Final = bytes(2 * _NBYTES)
_PIECE: Final = 1 << 16  # words that are looked at together: what is made of them stays in a cache
_ODD: Final = 0x1E3779B97F4A7C15  # 2**64 / golden ratio, but for the sign: spreads small numbers
_log = logging.getLogger("ringcomm")


class FirstWeights:
    """The weights with which one optimizer begins. Every rank goes through the same calls.

    Of `known` parameters, frozen ones that the optimizer does not hold are compared too, and left
    as they are: they may be another's.
    """

    def __init__(self, *, is_wanted: bool = True, known: Named = ()) -> None:
        self._is_wanted = is_wanted
        self._is_compared = not is_wanted
        self._known = known
        self._do_differ = False
        self._sums: list[Sums] = []
        self._do_others_differ = False
        self._others: list[str] = []

    def expect_more(self) -> None:
        """Compare again: there are parameters that have not been."""
        self._is_compared = not self._is_wanted

    def digest(self, named: Named) -> bytes:
        """Return 16 bytes that differ where weights do, then 16 of frozen ones it does not hold.

        Zeros once they have been compared.
        """
        if self._is_compared:
            return _NOTHING
        self._sums = [fingerprint(each) for _, each in named if _is_comparable(each)]
        held = {id(each) for _, each in named}
        others = [
            (name, each)
            for name, each in sorted(self._known, key=operator.itemgetter(0))
            if id(each) not in held and not each.requires_grad and _is_comparable(each)
        ]
        self._others = [name for name, _ in others]
        return _hash(self._sums) + _hash([(name, fingerprint(each)) for name, each in others])

    def note(self, combined: bytes) -> None:
        """Note the verdict: digest() of all ranks, each with its complement, combined by BOR."""
        n = len(combined) // 4
        mine, others, not_mine, not_others = (combined[i * n : (i + 1) * n] for i in range(4))
        self._do_differ |= not is_alike(mine + not_mine)
        self._do_others_differ |= not is_alike(others + not_others)
        self._is_compared = True

    def compare(self, named: Named, group: Group, suffix: str) -> None:
        """Compare them now, unless that was done, and make them alike. Collective."""
        if self._is_compared:
            return
        message = np.frombuffer(bytearray(with_complement(self.digest(named))), np.uint8)
        collectives.allreduce_(message, BOR, name=f"digest of weights{suffix}", group=group)
        self.note(message.tobytes())
        finish_together([self.make_alike(named, group, suffix)])

    def make_alike(self, named: Named, group: Group, suffix: str) -> CollectiveTask[None]:
        """Give all ranks the weights of the first that is not in join(), with a warning.

        Collective if they differ. Of frozen ones that differ beside the optimizer's there is a
        warning alone. Autograd does not know of it: a graph that is kept for another backward()
        stays usable.
        """
        if not (self._do_differ or self._do_others_differ):
            return
        mine = np.array([(group.index, 0), *self._sums], np.int64).reshape(1, -1, 2)
        handle = collectives.allgather_async(mine, name=f"sums of weights{suffix}", group=group)
        yield handle
        sums = handle.wait()
        root = int(sums[0, 0, 0])
        do_differ, do_others_differ = self._do_differ, self._do_others_differ
        self._do_differ = self._do_others_differ = False
        if do_others_differ and group.index == root:
            _warn_of_others(self._others)
        if not do_differ:
            return
        comparable = [(name, each.data) for name, each in named if _is_comparable(each)]
        handles: list[Handle[Any]] = [
            collectives.broadcast_async_(each, root, name=f"weights of {name}{suffix}", group=group)
            for name, each in comparable
        ]
        for each in handles:
            yield each
            each.wait()
        if group.index == root:
            _warn([name for name, _ in comparable], sums[:, 1:], group.ranks[root])


def fingerprint(x: torch.Tensor) -> Sums:
    """Return 128 bits that differ where elements do, on whatever device x is.

    Its layout in memory does not count, so that a tensor in channels_last equals one that is not.
    """
    words = _words(x.detach())
    n = min(len(words), _PIECE)
    weights = _mixed(torch.arange(1, n + 1, dtype=torch.int64, device=words.device)) | 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    weighed = torch.zeros_like(total)
    for number, piece in enumerate(torch.split(words, _PIECE)):
        mixed = _mixed(piece)
        total += mixed.sum()
        weighed += (mixed * weights[: len(piece)]).sum() * (2 * number + 1)
    first, second = torch.stack([total, weighed]).tolist()
    return first, second


def _hash(sums: Sequence[object]) -> bytes:
    return hashlib.blake2b(repr(sums).encode(), digest_size=_NBYTES).digest()


def _words(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of x, with zeros to the next word, as int64."""
    line = x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    missing = -len(line) % 8
    if missing or line.data_ptr() % 8 or line.storage_offset() % 8:
        line = torch.cat([line, line.new_zeros(missing)])
    return line.view(torch.int64)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Spread each word's bits: of signs alone, which are the highest bits, sums would lose most."""
    words = (words ^ (words >> 32)) * _ODD
    return words ^ (words >> 29)


def _is_comparable(x: torch.Tensor) -> bool:
    """Return True for a plain tensor: a DTensor, or what is still lazy, has no whole here."""
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and x.layout is torch.strided and x.device.type != "meta"


def _warn(names: Sequence[str], sums: NDArray[np.int64], rank: int) -> None:
    """Say which weights differed; sums: of each rank's parameters, shape (ranks, len(names), 2)."""
    has_differed = (sums != sums[0]).any(axis=(0, 2))
    differ = [name for name, has in zip(names, has_differed, strict=True) if has]
    _log.warning(
        "DistributedOptimizer: ranks began with different weights (%s: %d of %d parameters), so "
        "all have those of rank %d now. Call hvd.broadcast_parameters(model.state_dict()) before "
        "the first step, which brings buffers along; or pass sync_weights=False if ranks are to "
        "differ",
        ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else ""),
        len(differ),
        len(names),
        rank,
    )


def _warn_of_others(names: Sequence[str]) -> None:
    """Say that frozen parameters differ that are not the optimizer's; names: on this rank."""
    _log.warning(
        "DistributedOptimizer: ranks have different weights in the %d frozen parameters that it "
        "does not hold (%s), so each rank trains another model. Call "
        "hvd.broadcast_parameters(model.state_dict()) before the first step; or pass "
        "sync_weights=False if ranks are to differ",
        len(names),
        ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
    )
