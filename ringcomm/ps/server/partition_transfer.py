"""Packs partitions for other servers, installs those that arrive; see core.migration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from ringcomm.ps.partition_state import PartitionState
from ringcomm.ps.protocol.frames import INLINE_MAX
from ringcomm.ps.server.dense.block import BlockTraffic
from ringcomm.ps.server.dense.partition import DensePartition
from ringcomm.ps.server.rows.row_partition import RowsPartition

if TYPE_CHECKING:
    from ringcomm.arrays.base import Bytes
    from ringcomm.ps.protocol.wire import Wire
    from ringcomm.ps.server.catalog import Catalog
    from ringcomm.ps.server.core.actions import Key
    from ringcomm.ps.server.core.core import Core
    from ringcomm.ps.server.rows.hash_shard import Shard


class Transfer:
    """Packs partitions of one server, and installs those that come.

    Args:
        core: decides.
        catalog: what there is.
        link: the wire.
        memory: returns memory that others on this node map.
    """

    def __init__(
        self, core: Core, catalog: Catalog, *, link: Wire, memory: Callable[[int], Bytes]
    ) -> None:
        self._core, self._catalog = core, catalog
        self._link, self._memory = link, memory
        self._retired: dict[tuple[Key, int], Bytes] = {}  # what clients may still be reading

    # --- the source -----------------------------------------------------------------------------
    def state_of(self, key: Key, part: int) -> PartitionState:
        """Return a copy of a partition, as put() takes it."""
        contents = self._catalog.contents[key[0]]
        unit = self._core.unit_of(key)
        values: DensePartition | RowsPartition
        if contents.shard is None:
            values = contents.parts[part]
            held = values.held_arrays()
            applied = sorted(unit.applied_without_pending().items())
            more: dict[str, Any] = {
                "traffic": asdict(values.traffic),
                "is_ready": values.is_ready,
                "version": values.version,
                "let_in": unit.rounds.let_in() if unit.rounds is not None else [],
                "held_of": None,
            }
            if unit.rounds is not None and unit.rounds.held is not None:
                more["held_of"] = sorted(unit.rounds.held)
        else:
            values = RowsPartition(contents.shard, part)
            held = contents.shard.held.share_of(part)
            applied = values.applied(unit.applied_without_pending())
            more = {
                "n_keys": int(contents.shard.rows.n_keys()[part]),
                "rounds_before": contents.shard.rounds_before,
                "n_outside": contents.shard.n_outside,
            }
        state = values.state()
        state.arrays.update(held)
        return PartitionState({**state.meta, **more, "applied": applied}, state.arrays)

    def staged(self, pieces: Sequence[Bytes], rank: int) -> Bytes:
        """Return bytes, one behind the other, where a rank can read them. Raises MemoryError."""
        nbytes = sum(piece.nbytes for piece in pieces)
        is_shared = nbytes > INLINE_MAX // 2 and self._link.shares_memory(rank)
        body = self._memory(nbytes) if is_shared else np.empty(nbytes, np.uint8)
        return np.concatenate(pieces, out=body)

    def retire(self, key: Key, epoch: int) -> None:
        """Remove a dense partition, but keep its memory, which clients may still read."""
        part = self._catalog.contents[key[0]].parts.pop(key[1])
        self._retired[key, epoch] = part.memory

    def free(self, key: Key, epoch: int) -> None:
        self._retired.pop((key, epoch), None)

    def clear(self) -> None:
        self._retired.clear()

    def forget(self, key: Key, part: int) -> None:
        shard = self._catalog.contents[key[0]].shard
        assert shard is not None
        shard.disown(part)
        shard.held.drop(part)

    # --- the destination ------------------------------------------------------------------------
    def install(self, number: int, part: int, body: Bytes) -> str:
        """Install a partition that was sent; return why that cannot be, or nothing."""
        contents = self._catalog.contents.get(number)
        if contents is None:
            return f"has no table {number}"  # any more: a server died
        try:
            self.put(number, part, PartitionState.unpacked(body))
        except Exception as error:  # noqa: BLE001 - it stays where it was; the caller gets the error
            if contents.shard is not None:
                contents.shard.disown(part)
            return f"cannot take it: {type(error).__name__}: {error}"
        return ""

    def put(self, number: int, part: int, state: PartitionState) -> None:
        shard = self._catalog.contents[number].shard
        if shard is None:
            self._install_dense(number, part, state)
        else:
            put_rows(shard, part, state)

    def _install_dense(self, number: int, part: int, state: PartitionState) -> None:
        contents, meta = self._catalog.contents[number], state.meta
        values = DensePartition(contents.spec, meta["start"], meta["stop"], self._memory)
        values.load(state)
        values.is_ready, values.version = meta["is_ready"], meta["version"]
        values.counts = BlockTraffic.of_json(meta["traffic"])
        values.merge_applied(meta["applied"])
        contents.parts[part] = values
        unit = self._catalog.add_unit(number, part)
        if unit.rounds is not None:
            unit.rounds.resume(meta["version"], meta["let_in"], meta["held_of"])
        if meta["held_of"] is not None:
            values.load_held(state.arrays)


def put_rows(shard: Shard, part: int, state: PartitionState) -> None:
    rows, arrays = RowsPartition(shard, part), state.arrays
    held = {name: arrays.pop(name) for name in [*arrays] if name.startswith("held")}
    rows.load(state)
    rows.merge_applied(state.meta["applied"])
    shard.own(part, state.meta["n_keys"])
    shard.rounds_before = state.meta["rounds_before"]
    shard.n_outside = max(shard.n_outside, state.meta["n_outside"])
    shard.held.add(held)
