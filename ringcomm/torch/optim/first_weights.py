"""Compares the ranks' first weights; if these differ, all ranks get the first rank's weights.

Ranks compare a fingerprint of the weights in the same message as the parameters' names and shapes.
Nothing is logged if broadcast_parameters() has made the weights the same.
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

from ringcomm.collectives.operators import BOR
from ringcomm.engine.api import collectives
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle
from ringcomm.torch.backward.collective_tasks import CollectiveTask, finish_together
from ringcomm.torch.backward.equality import is_alike, with_complement

Named = Sequence[tuple[str, torch.Tensor]]
Sums = tuple[int, int]

_NBYTES: Final = 16
_NOTHING: Final = bytes(2 * _NBYTES)
_PIECE: Final = 1 << 16  # words per iteration: few enough that temporary tensors stay in a cache
_ODD: Final = 0x1E3779B97F4A7C15  # about 2**64 / golden ratio, as int64: spreads small numbers
_log = logging.getLogger("ringcomm")


class FirstWeights:
    """The first weights of one optimizer. Every rank makes the same calls.

    Args:
        is_wanted: False turns the comparison off.
        known: named parameters of the model. Frozen ones that the optimizer does not hold are
            compared, too, but never changed: another optimizer may hold them.
    """

    def __init__(self, *, is_wanted: bool, known: Named) -> None:
        self._is_wanted = is_wanted
        self._is_compared = not is_wanted
        self._known = known
        self._do_differ = False
        self._sums: list[Sums] = []
        self._do_others_differ = False
        self._others: list[str] = []

    def expect_more(self) -> None:
        """Compare again: there are new parameters."""
        self._is_compared = not self._is_wanted

    def digest(self, named: Named) -> bytes:
        """Return hashes of the optimizer's weights, and of frozen weights that it does not hold.

        Both are zeros if the weights have been compared already.
        """
        if self._is_compared:
            return _NOTHING
        self._sums = [fingerprint(each) for _, each in named if _is_comparable(each)]
        held = {id(each) for _, each in named}
        others = [
            (name, fingerprint(each))
            for name, each in sorted(self._known, key=operator.itemgetter(0))
            if id(each) not in held and not each.requires_grad and _is_comparable(each)
        ]
        self._others = [name for name, _ in others]
        return _hash(self._sums) + _hash(others)

    def note(self, combined: bytes) -> None:
        """Note from the BOR of all ranks' digests and complements whether weights differ."""
        n = _NBYTES
        mine, others, not_mine, not_others = (combined[i * n : (i + 1) * n] for i in range(4))
        self._do_differ |= not is_alike(mine + not_mine)
        self._do_others_differ |= not is_alike(others + not_others)
        self._is_compared = True

    def compare(self, named: Named, group: Group, suffix: str) -> None:
        """Compare the weights, and make them the same, unless this was done before. Collective."""
        if self._is_compared:
            return
        message = np.frombuffer(bytearray(with_complement(self.digest(named))), np.uint8)
        collectives.allreduce_(message, BOR, name=f"digest of weights{suffix}", group=group)
        self.note(message.tobytes())
        finish_together([self.make_alike(named, group, suffix)])

    def make_alike(self, named: Named, group: Group, suffix: str) -> CollectiveTask[None]:
        """If weights differ, broadcast those of the first rank that is not in join(), and warn.

        Collective if they differ. If only frozen weights outside the optimizer differ, only warn.
        The tensors keep their versions, so autograd can still use a retained graph.
        """
        if not (self._do_differ or self._do_others_differ):
            return
        mine = np.array([(group.index, 0), *self._sums], np.int64).reshape(1, -1, 2)
        handle = collectives.allgather_async(mine, name=f"sums of weights{suffix}", group=group)
        yield handle
        sums = handle.wait()
        root = int(sums[0, 0, 0])
        if self._do_others_differ and group.index == root:
            _warn_of_others(self._others)
        self._do_others_differ = False
        if not self._do_differ:
            return
        self._do_differ = False
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
    """Return 128 bits that differ if elements differ; x may be on any device.

    The bits do not depend on strides: channels_last and contiguous tensors may have the same bits.
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
    """Return the bytes of x as int64, padded with zeros."""
    line = x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    missing = -len(line) % 8
    if missing or line.data_ptr() % 8 or line.storage_offset() % 8:
        line = torch.cat([line, line.new_zeros(missing)])
    return line.view(torch.int64)


def _mixed(words: torch.Tensor) -> torch.Tensor:
    """Return words with mixed bits: a sum of plain words would lose the highest bits, the signs."""
    words = (words ^ (words >> 32)) * _ODD
    return words ^ (words >> 29)


def _is_comparable(x: torch.Tensor) -> bool:
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and x.layout is torch.strided and x.device.type != "meta"


def _warn(names: Sequence[str], sums: NDArray[np.int64], rank: int) -> None:
    """Warn which weights differ; sums: fingerprints, shape (ranks, len(names), 2)."""
    are_different = (sums != sums[0]).any(axis=(0, 2))
    different = [name for name, differs in zip(names, are_different, strict=True) if differs]
    _log.warning(
        "DistributedOptimizer: ranks began with different weights (%s: %d of %d parameters), so "
        "all ranks now have the weights of rank %d. Before the first step, call "
        "hvd.broadcast_parameters(model.state_dict()), which also sends buffers; or pass "
        "sync_weights=False if ranks are to differ",
        ", ".join(different[:3]) + (", ..." if len(different) > 3 else ""),
        len(different),
        len(names),
        rank,
    )


def _warn_of_others(names: Sequence[str]) -> None:
    _log.warning(
        "DistributedOptimizer: ranks have different weights in the %d frozen parameters that it "
        "does not hold (%s), so ranks train different models. Call "
        "hvd.broadcast_parameters(model.state_dict()) before the first step; or pass "
        "sync_weights=False if ranks are to differ",
        len(names),
        ", ".join(names[:3]) + (", ..." if len(names) > 3 else ""),
    )
