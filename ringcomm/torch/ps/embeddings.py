"""Embeddings whose rows are on parameter servers: nn.Embedding and nn.EmbeddingBag by key.

A forward pass pulls the rows of the distinct keys in the batch. The backward pass pushes their
gradients as soon as they are complete. The servers update the rows, not an optimizer of the worker.
But a ps.DistributedOptimizer that clips or unscales gradients includes those of rows.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Final, Literal, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ringcomm.codec import Codec
from ringcomm.ps.checkpoint.auto_recovery import fetched
from ringcomm.ps.client.future import Future, Pushed
from ringcomm.ps.client.rows.hash_table import HashTable, hashtable
from ringcomm.ps.initializers import Initializer, normal
from ringcomm.ps.optim import Updater
from ringcomm.ps.row_policies import Admit, Evict
from ringcomm.ps.session import is_chief
from ringcomm.ps.update_modes import Mode
from ringcomm.torch.ps.row_gradients import submit
from ringcomm.torch.ps.worker_counts import enrol_embedding
from ringcomm.torch.untraced import not_inlined, untraced

_HANDLE_KEY: Final = "_extra_state"  # as torch names what is in a state_dict beside parameters
_log: Final = logging.getLogger("ringcomm")


class _Rows(nn.Module):
    """Base of Embedding and EmbeddingBag.

    Attributes:
        table: the hash table of the rows.
        samples: weight of this worker's gradients in the mean of a round; None: the value of the
            optimizer's set_samples() for this step, or 1.
        pushed: future of the last push; None before the first. The backward pass pushes, or step()
            of an optimizer with max_grad_norm= or scaler=.
        given: ids of the next forward(), what distinct() returns of them, and their rows; or None.
        is_in_state_dict: state_dict() fetches all rows from the servers as "weight", and
            load_state_dict() loads them. ps.convert() sets it. It needs num_embeddings. If False,
            state_dict() has a handle, "_extra_state": the name of the table as a tensor. None: the
            same, and the first state_dict() warns that it has no rows.
        is_trained: rows get gradients, which backward() pushes; see requires_grad_().
    """

    def __init__(
        self, num_embeddings: int | None, dim: int, *, name: str,
        init: Initializer | None = None, optimizer: Updater | None = None,
        admit: Admit | None = None, evict: Evict | None = None, padding_idx: int | None = None,
        mode: str | Mode = "async", dtype: torch.dtype = torch.float32,
        compression: str | Codec | None = None, pull_compression: str | Codec | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if num_embeddings is not None and num_embeddings < 1:
            raise ValueError(
                f"embedding[{name}]: num_embeddings is {num_embeddings}; one at least, or None"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = dim
        self.padding_idx = _padding(padding_idx, num_embeddings, name)
        self.dtype = dtype
        self.samples: float | None = None
        self.given: tuple[Tensor, np.ndarray, Tensor, np.ndarray] | None = None
        self.is_in_state_dict: bool | None = None
        self._has_warned = False
        self.is_trained = True
        self.pushed: Future[Pushed] | None = None
        init = normal(std=1.0) if init is None else init  # as nn.Embedding begins
        self.table: HashTable = hashtable(
            name, dim, dtype=str(dtype).removeprefix("torch."), updater=optimizer, mode=mode,
            init=init, admit=admit, evict=evict, compression=compression,
            pull_compression=pull_compression,
        )  # fmt: skip
        enrol_embedding()

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no weight: the rows are on the servers. weight_now() "
                "fetches them, load() sets them, and init= says how new ones begin"
            )
        return super().__getattr__(name)

    @property
    def optimizer(self) -> Updater:
        """The servers' update; set it to change hyper-parameters."""
        return self.table.updater

    @optimizer.setter
    def optimizer(self, updater: Updater) -> None:
        self.table.updater = updater

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Let later forward passes train the rows, or, if False, read them only; return self.

        Rows are no parameters, so requires_grad_() of a model around it does not reach it. In a
        table with rounds all workers call it between the same two steps.
        """
        self.is_trained = requires_grad
        return super().requires_grad_(requires_grad)

    def load(self, weight: Tensor) -> None:
        """Set the values of rows 0 to len(weight) - 1; wait until the servers have them.

        Args:
            weight: shape (rows, dim).

        Raises:
            ValueError: weight has another shape, or the table did not admit some of the rows.
        """
        limit = len(weight) if self.num_embeddings is None else self.num_embeddings
        if weight.ndim != 2 or weight.shape[1] != self.embedding_dim or len(weight) > limit:
            raise ValueError(
                f"embedding[{self.table.name}]: got weight of shape {tuple(weight.shape)}, and "
                f"there are {self.num_embeddings} rows of {self.embedding_dim}"
            )
        rejected = 0
        for start, stop in self._portions(len(weight)):
            values = weight[start:stop].detach().to("cpu", self.dtype).contiguous().numpy()
            done = self.table.push(np.arange(start, stop), values, assign=True).wait()
            rejected += done.rejected
        if rejected:
            raise ValueError(
                f"embedding[{self.table.name}]: {rejected} of {len(weight)} rows were not "
                "admitted. Open it without admit= to load values"
            )

    def weight_now(self) -> Tensor:
        """Return the current values of all rows: shape (num_embeddings, dim).

        Raises:
            ValueError: num_embeddings is None, so that any id may come.
        """
        if self.num_embeddings is None:
            raise ValueError(
                f"embedding[{self.table.name}]: any id may come (num_embeddings is None), so there "
                "is no matrix of all rows. Use ps.save() and ps.load_state_dict()"
            )
        weight = torch.empty(self.num_embeddings, self.embedding_dim, dtype=self.dtype)
        for start, stop in self._portions(len(weight)):
            self.table.pull(
                np.arange(start, stop), out=weight[start:stop].numpy(), exact=True
            ).wait()
        return weight

    def _portions(self, n: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows for requests of 16 MiB."""
        step = max(1, (16 << 20) // (self.embedding_dim * self.dtype.itemsize))
        for start in range(0, n, step):
            yield start, min(n, start + step)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_in_state_dict:
            destination[f"{prefix}weight"] = self.weight_now()
        else:
            destination[prefix + _HANDLE_KEY] = _handle(self.table)
            self._warn_of_rows_left_out()

    def _warn_of_rows_left_out(self) -> None:
        if self.is_in_state_dict is not None or self._has_warned:
            return
        self._has_warned = True
        ways = "ps.save() saves them, and ps.export_safetensors() makes a file of that; "
        if self.num_embeddings is not None:
            ways += "with is_in_state_dict = True of the embedding, state_dict() fetches them all; "
        warnings.warn(
            f"embedding[{self.table.name}]: state_dict() has none of its rows, which are on the "
            f"servers. {ways}False says that they are to be left out, without this warning",
            stacklevel=2,
        )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *more: Any) -> None:
        """On the chief, send "weight" to the servers; see nn.Module."""
        if self.is_in_state_dict:
            _, strict, missing_keys, _, error_msgs = more
            key = f"{prefix}weight"
            if key not in state_dict:
                missing_keys += [key] if strict else []
            elif is_chief():
                try:
                    self.load(state_dict[key])
                except ValueError as error:
                    error_msgs.append(str(error))
        else:
            key = prefix + _HANDLE_KEY
            self._load_handle(state_dict, key, prefix, *more)
        state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(state_dict, prefix, *more)

    def _load_handle(self, state_dict: dict[str, Any], key: str, prefix: str, *more: Any) -> None:
        """Check what state_dict() has instead of the rows; say that these stay as they are."""
        _, strict, missing_keys, _, error_msgs = more
        who = f"embedding[{self.table.name}]"
        if strict and f"{prefix}weight" in state_dict:
            error_msgs.append(
                f"{who}: {prefix}weight is not loaded, for the rows are on the servers. Set "
                "is_in_state_dict = True of the embedding, or call its load()"
            )
        if key not in state_dict:
            missing_keys += [key] if strict else []
        elif not torch.equal(state_dict[key], handle := _handle(self.table)):
            there, here = (bytes(each.tolist()).decode() for each in (state_dict[key], handle))
            error_msgs.append(f"{who}: its rows are {here}, and those of the state are {there}")
        elif is_chief():
            _log.warning(
                "%s: load_state_dict() leaves its rows on the servers as they are. ps.restore() "
                "and ps.load() load them from a checkpoint of ps.save(); with is_in_state_dict = "
                "True of the embedding, state_dict() has them",
                who,
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"embedding[{self.table.name}]: it cannot be copied or pickled, because its rows are "
            "on the servers. Save model.state_dict() and ps.save(); copy or average the modules "
            "beside it; copy.deepcopy(model, {id(embedding): embedding}) makes a copy that shares "
            "the rows"
        )

    def distinct(self, ids: Tensor) -> tuple[np.ndarray, Tensor]:
        """Return the distinct ids, ascending, and the index of each id among them."""
        if not isinstance(ids, Tensor):
            raise TypeError(
                f"embedding[{self.table.name}]: ids are a {type(ids).__name__}; pass a tensor of "
                "integers"
            )
        if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype == torch.bool:
            raise TypeError(
                f"embedding[{self.table.name}]: ids are {ids.dtype}; they must be integers"
            )
        ids = ids.detach()
        is_unsigned = ids.dtype == getattr(torch, "uint64", None)
        if is_unsigned:
            ids = ids.view(torch.int64)  # torch sorts no uint64
        keys, where = torch.unique(ids.to(torch.int64), return_inverse=True)
        found = keys.cpu().numpy()
        found = found.view(np.uint64) if is_unsigned else found
        self._require_range(found)
        return found, where

    @not_inlined
    def _pulled(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Return the rows of the distinct ids, the index of each id's row, and of padding's row."""
        given, self.given = self.given, None
        if given is None or given[0] is not ids:
            keys, where = self.distinct(ids)
            given = ids, keys, where, fetched(lambda: self.table.pull(keys).wait())
        _, unique, where, values = given
        rows = torch.from_numpy(values)
        padding = None
        if self.padding_idx is not None and (at := np.flatnonzero(unique == self.padding_idx)).size:
            padding = int(at[0])
            rows[padding] = 0
        rows = rows.to(ids.device)
        if torch.is_grad_enabled() and self.is_trained:
            rows.requires_grad_()
            rows.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda leaf: self._push(unique, leaf, padding)
            )
        return rows, where, padding

    @untraced
    def _push(self, keys: np.ndarray, rows: Tensor, padding: int | None) -> None:
        assert rows.grad is not None
        grad = rows.grad.detach().cpu().contiguous().numpy()
        rows.grad = None  # a second backward() pushes only its own gradient
        if padding is not None:
            keys, grad = np.delete(keys, padding), np.delete(grad, padding, 0)
        submit(self.table, keys, grad, self.samples, partial(setattr, self, "pushed"))

    def _require_range(self, keys: np.ndarray) -> None:
        if not len(keys):
            return
        least, most = int(keys.min()), int(keys.max())
        n = self.num_embeddings
        if least < 0 or (n is not None and most >= n):
            hint = "" if n is not None else ". Pass hashes of 64 bits as ids.view(torch.uint64)"
            raise IndexError(
                f"embedding[{self.table.name}]: id {least if least < 0 else most} is not in "
                f"[0, {'2^64' if n is None else n}){hint}"
            )

    def extra_repr(self) -> str:
        """Return the text of the module in print()."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}, name={self.table.name!r}{padding}"


class Embedding(_Rows):
    """nn.Embedding whose rows are on parameter servers. It needs ps.init() before.

    Each forward pass with its backward pass is one push. In a table with rounds, each worker must
    run the same number of them, if necessary without ids. If a ps.DistributedOptimizer has
    max_grad_norm= or scaler=, its next step() pushes their sum instead. It clips the sum by the
    norm of all gradients, and drops it if it skips the step.

    Args:
        num_embeddings: limit of the ids; None: any id in [0, 2^64) may come, in int64 or uint64.
        dim: number of columns of a row.
        name: name of the table, the same on all workers.
        init: values of a new row; normal with std 1 if not given, as nn.Embedding.
        optimizer: the servers' update; ps.optim.SGD(0.01) if not given.
        admit: the ids that get a row; all if not given. The other ids read as new rows.
        evict: the rows that are dropped; none if not given.
        padding_idx: the id whose row is zeros and is never updated.
        mode: when pushes become updates, see ps.hashtable().
        dtype: dtype of the rows, torch.float32 or float64.
        compression: how gradients are sent, see ps.hashtable().
        pull_compression: how rows are sent.
    """

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids: shape of ids, then dim."""
        rows, where, padding = self._pulled(ids)
        return F.embedding(where, rows, padding)


class EmbeddingBag(_Rows):
    """nn.EmbeddingBag whose rows are on parameter servers: sums, means or maxima of bags of rows.

    The other arguments are those of Embedding.

    Args:
        num_embeddings: limit of the ids; None: any id in [0, 2^64) may come, in int64 or uint64.
        dim: number of columns of a row.
        name: name of the table, the same on all workers.
        bag: how a bag becomes one row: "sum", "mean" or "max"; `mode` of nn.EmbeddingBag.
        include_last_offset: offsets end with the number of ids.
    """

    def __init__(
        self, num_embeddings: int | None, dim: int, *, name: str,
        bag: Literal["sum", "mean", "max"] = "mean",
        include_last_offset: bool = False,
        init: Initializer | None = None, optimizer: Updater | None = None,
        admit: Admit | None = None, evict: Evict | None = None, padding_idx: int | None = None,
        mode: str | Mode = "async", dtype: torch.dtype = torch.float32,
        compression: str | Codec | None = None, pull_compression: str | Codec | None = None,
    ) -> None:  # fmt: skip
        if bag not in ("sum", "mean", "max"):
            raise ValueError(f"embedding[{name}]: bag is {bag!r}; it must be sum, mean or max")
        super().__init__(
            num_embeddings, dim, name=name, init=init, optimizer=optimizer, admit=admit,
            evict=evict, padding_idx=padding_idx, mode=mode, dtype=dtype, compression=compression,
            pull_compression=pull_compression,
        )  # fmt: skip
        self.bag = bag
        self.include_last_offset = include_last_offset

    def forward(
        self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Return one row per bag.

        Args:
            ids: shape (bags, n) without offsets; else (n,).
            offsets: index in ids where each bag begins.
            per_sample_weights: weights in the shape of ids; only for sums.
        """
        rows, where, padding = self._pulled(ids)
        return F.embedding_bag(
            where, rows, offsets, mode=self.bag, per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset, padding_idx=padding,
        )  # fmt: skip


def _handle(table: HashTable) -> Tensor:
    """Return what stands for the rows in a state_dict: a tensor, as everything else there."""
    text = json.dumps({"on the servers, in table": table.name, "dim": table.dim})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _padding(index: int | None, n: int | None, name: str) -> int | None:
    if index is None:
        return None
    if n is not None and -n <= index < n:
        return index % n
    if n is None and 0 <= index < 1 << 64:
        return index
    raise ValueError(f"embedding[{name}]: padding_idx is {index}, and there are {n} rows")
