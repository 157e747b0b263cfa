"""Copies of the shares of an optimizer's state, for elastic jobs: no death of one rank loses one.

At each commit a rank copies its share, and sends the copy to the next rank, which keeps it as well.
A copy is bytes in host memory: an outline, then the state of each piece of a parameter.

The copies of the commit before are dropped when all ranks have those of the new one. So at any
moment the ranks that live have all copies of the newest commit that any of them has completed,
unless a rank and the one after it are both lost. If ranks are to leave the job together, those that
stay get copies of all parts before. After a loss, `recover` gathers each parameter's
state from whoever has it, and gives each rank of the new view a part. These parts are shares of
their own until the next step, which deals them by buckets.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ringcomm.collectives.message_patterns import chunks
from ringcomm.elastic.views import view
from ringcomm.engine.api import collectives
from ringcomm.engine.api.begin_next_view import ranks_to_stay
from ringcomm.engine.api.point_to_point import irecv, isend, sendrecv
from ringcomm.engine.core.group import Group
from ringcomm.engine.core.handle import Handle, wait_all
from ringcomm.errors import RingcommError
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.zero.optimizer_shard import OptimizerShard, Pieces, Shares
from ringcomm.torch.zero.parameter_state import ParameterState
from ringcomm.torch.zero.whole_states import start_allgather_into

Bytes: TypeAlias = NDArray[np.uint8]


class Tag(NamedTuple):
    """The commit and view in which shares were copied.

    A later view has the same state, dealt to other ranks.
    """

    commit: int
    view: int


class CopyOutline(NamedTuple):
    """Of one piece: its parameter, its elements, the dtypes of their state, and what they share."""

    parameter: int  # index
    start: int
    stop: int
    dtypes: dict[str, str]
    common: dict[str, Any]


class Holding(NamedTuple):
    """A copy that a rank has: of which rank's share, of how many, and what is in it."""

    tag: Tag
    owner: int
    n_owners: int
    outlines: list[CopyOutline]


@dataclass(frozen=True)
class CopySet:
    """The copies that this rank has of one commit: of its share, and of others.

    n_owners: how many ranks have a share; 0: the state was whole on each rank.
    kept: of the shares of other ranks, by rank: of the one before, and of some that are to leave.
    fewest: so many ranks, the first ones, have copies of all shares.
    """

    tag: Tag
    n_owners: int = 0
    index: int = 0
    shares: Shares | None = None
    own: Bytes | None = None
    kept: Mapping[int, Bytes] = field(default_factory=dict)
    fewest: int = 1

    def copies(self) -> dict[int, Bytes]:
        return {**self.kept} if self.own is None else {**self.kept, self.index: self.own}


class ShareCopies:
    def __init__(self, reducer: GradientReducer, shard: OptimizerShard) -> None:
        self._reducer, self._shard = reducer, shard
        self._whole: CopySet | None = None  # all ranks had it when this one made it
        self._new: CopySet | None = None
        self._before: CopySet | None = None  # `_whole` before a recover() that others may lack

    def replicate(self, commit: int) -> None:
        """Copy this rank's share, and send the copy to the next rank. Collective.

        Args:
            commit: number of the commit that follows.
        """
        tag = Tag(commit, view().number)
        if self._shard.group is None:
            self._new = self._whole = CopySet(tag)
            return
        self._shard.require_fresh()
        self._send(tag, self._shard.pieces(), self._shard.shares())

    @property
    def fewest_ranks(self) -> int:
        return 1 if self._whole is None else self._whole.fewest

    def _send(self, tag: Tag, pieces: Pieces, shares: Shares) -> None:
        group, suffix = self._group, self._reducer.plan.suffix
        own = packed(pieces)
        kept, n_stay = {}, group.size
        if group.size > 1:
            mine = np.array([[own.size, ranks_to_stay(group.size)]])
            said = collectives.allgather(mine, name=f"lengths of shares{suffix}", group=group)
            lengths, n_stay = said[:, 0].tolist(), int(said[0, 1])  # rank 0 begins another view
            last, following = (group.index - 1) % group.size, (group.index + 1) % group.size
            kept[last] = np.empty(lengths[last], np.uint8)
            sendrecv(own, following, kept[last], last, group=group)
            kept |= self._kept_of_leaving(own, lengths, n_stay)
        fewest = max(1, min(n_stay, group.size - 1))
        self._new = CopySet(tag, group.size, group.index, shares, own, kept, fewest)
        collectives.barrier(name=f"shares are copied{suffix}", group=group)
        self._whole = self._new

    def _kept_of_leaving(self, own: Bytes, lengths: Sequence[int], n_stay: int) -> dict[int, Bytes]:
        """Return copies of the shares of ranks that are to leave, as is the one after them."""
        group, kept = self._group, {}
        pending: list[Handle[Any]] = []
        for owner in range(n_stay, group.size - 1):
            keeper = owner % n_stay
            if group.index == owner:
                pending.append(isend(own, keeper, group=group))
            elif group.index == keeper:
                kept[owner] = np.empty(lengths[owner], np.uint8)
                pending.append(irecv(kept[owner], owner, group=group))
        wait_all(pending)
        return kept

    def recover(self, commit: int) -> None:
        """Deal the shares of a commit to the ranks of this view. Collective.

        Raises:
            RingcommError: on all ranks: a share and its copy are lost.
        """
        mine = [] if commit < 0 else [each for each in self._sets if each.tag.commit == commit]
        copies = {(each.tag, owner): data for each in mine for owner, data in each.copies().items()}
        holdings = [
            Holding(each.tag, owner, each.n_owners, outlines_of(data)[0])
            for each in mine
            for owner, data in each.copies().items()
        ]
        whole = [each.tag for each in mine if not each.n_owners]
        of_ranks = collectives.allgather_object(
            (holdings, whole), name=f"shares of the state{self._reducer.plan.suffix}"
        )
        if any(tags for _, tags in of_ranks):
            self._new = self._whole = CopySet(Tag(commit, view().number))
            return
        tag, holders = _complete([each for each, _ in of_ranks])
        self._before = self._before or self._whole
        self._whole = next((each for each in mine if each.tag == tag), None)
        if tag.view == view().number:
            return
        pieces, shares = self._dealt(tag, of_ranks, holders, copies)
        self._send(Tag(commit, view().number), pieces, shares)

    def restore(self) -> None:
        """Return to the share of the last commit; local, on all ranks."""
        kept, self._before = self._whole, None
        if kept is None or kept.own is None or kept.shares is None:
            return
        if (kept.n_owners, kept.index) != (self._group.size, self._group.index):
            raise RingcommError(
                f"DistributedOptimizer: the state was spread over {kept.n_owners} ranks, and there "
                f"are {self._group.size} now: call the sync() of TorchState in sync()"
            )
        self._shard.adopt(unpacked(kept.own), kept.shares)

    @property
    def _group(self) -> Group:
        return self._reducer.options.group

    @property
    def _sets(self) -> list[CopySet]:
        sets = {id(each): each for each in (self._whole, self._new, self._before)}
        return [each for each in sets.values() if each is not None]

    def _dealt(
        self,
        tag: Tag,
        of_ranks: Sequence[tuple[list[Holding], Any]],
        holders: Mapping[int, int],
        copies: Mapping[tuple[Tag, int], Bytes],
    ) -> tuple[Pieces, Shares]:
        """Return this rank's part of all parameters, and how many elements each rank has."""
        group, slots = self._group, self._reducer.slots
        mine = {
            (index, piece.start): state
            for owner, holder in holders.items()
            if holder == group.index
            for index, (piece, state) in unpacked(copies[tag, owner]).items()
        }
        of_index: dict[int, list[tuple[int, CopyOutline]]] = {}
        for owner, holder in holders.items():
            outlines = next(
                h.outlines for h in of_ranks[holder][0] if (h.tag, h.owner) == (tag, owner)
            )
            for outline in outlines:
                of_index.setdefault(outline.parameter, []).append((holder, outline))
        pieces: Pieces = {}
        shares: Shares = {}
        for index in sorted(of_index):
            parts = sorted(of_index[index], key=lambda part: part[1].start)
            n = parts[-1][1].stop
            cut = chunks(n, group.size)
            shares[index] = [part.stop - part.start for part in cut]
            lines = {
                key: self._gathered(index, key, parts, mine)[cut[group.index]].clone()
                for key in parts[0][1].dtypes
            }
            if shares[index][group.index]:
                state = ParameterState(lines, parts[0][1].common).to(slots[index].parameter.device)
                pieces[index] = cut[group.index], state
        return pieces, shares

    def _gathered(
        self,
        index: int,
        key: str,
        parts: Sequence[tuple[int, CopyOutline]],
        mine: Mapping[tuple[int, int], ParameterState],
    ) -> torch.Tensor:
        """Return one line of a parameter's state, whole, from the parts that ranks hold."""
        group, suffix = self._group, self._reducer.plan.suffix
        counts = [0] * group.size
        for holder, outline in parts:
            counts[holder] += outline.stop - outline.start
        dtype = getattr(torch, parts[0][1].dtypes[key])
        held = [
            mine[index, o.start].by_element[key] for holder, o in parts if holder == group.index
        ]
        by_rank = torch.empty(sum(counts), dtype=dtype)
        sent = torch.cat(held) if held else by_rank[:0]
        name = f"{key} of {self._reducer.slots[index].name} after a loss{suffix}"
        start_allgather_into(by_rank, sent, counts, name, group).wait()
        at = [sum(counts[:rank]) for rank in range(group.size)]
        whole = torch.empty_like(by_rank)
        for holder, outline in parts:
            n = outline.stop - outline.start
            whole[outline.start : outline.stop] = by_rank[at[holder] : at[holder] + n]
            at[holder] += n
        return whole


def _complete(of_ranks: Sequence[Sequence[Holding]]) -> tuple[Tag, dict[int, int]]:
    """Return the tag of the newest shares that are complete, and of each: a rank that has it."""
    tags = sorted({each.tag for held in of_ranks for each in held}, reverse=True)
    lost = "no rank that is left has any share of it"
    for tag in tags:
        holders: dict[int, int] = {}
        n = 0
        for rank, held in enumerate(of_ranks):
            for each in held:
                if each.tag == tag:
                    n = each.n_owners
                    holders.setdefault(each.owner, rank)
        if len(holders) == n:
            return tag, holders
        missing = sorted(set(range(n)) - holders.keys())
        lost = (
            f"of its {n} shares in view {tag.view}, those of ranks {missing} are lost: each of "
            "them and the rank after it, which had the copy"
        )
    raise RingcommError(
        f"DistributedOptimizer(shard_state=1): the optimizer's state cannot be restored: {lost}. "
        "Start the job again from a checkpoint"
    )


# --- bytes ----------------------------------------------------------------------------------------
def packed(pieces: Pieces) -> Bytes:
    """Return pieces as bytes."""
    outlines, lines = [], []
    for index, (own, state) in pieces.items():
        dtypes = {k: str(x.dtype).removeprefix("torch.") for k, x in state.by_element.items()}
        outlines.append(CopyOutline(index, own.start, own.stop, dtypes, dict(state.common)))
        lines += [
            x.detach().cpu().contiguous().view(torch.uint8) for x in state.by_element.values()
        ]
    head = pickle.dumps(outlines)
    data = np.empty(8 + len(head) + sum(map(len, lines)), np.uint8)
    data[:8] = np.frombuffer(len(head).to_bytes(8, "little"), np.uint8)
    data[8 : 8 + len(head)] = np.frombuffer(head, np.uint8)
    if lines:
        torch.cat(lines, out=torch.from_numpy(data[8 + len(head) :]))
    return data


def outlines_of(data: Bytes) -> tuple[list[CopyOutline], int]:
    end = 8 + int.from_bytes(data[:8].tobytes(), "little")
    return pickle.loads(data[8:end].tobytes()), end


def unpacked(data: Bytes) -> Pieces:
    """Return packed pieces, in memory of their own; by_element is in host memory."""
    outlines, at = outlines_of(data)
    pieces: Pieces = {}
    for outline in outlines:
        lines = {}
        for key, dtype in outline.dtypes.items():
            kind = getattr(torch, dtype)
            n = (outline.stop - outline.start) * kind.itemsize
            lines[key] = torch.from_numpy(data[at : at + n].copy()).view(kind)
            at += n
        own = slice(outline.start, outline.stop)
        pieces[outline.parameter] = own, ParameterState(lines, outline.common)
    return pieces
