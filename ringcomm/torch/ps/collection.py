"""Several embeddings that fetch their rows together, also those of the next batch ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ringcomm.ps.checkpoint.auto_recovery import fetched
from ringcomm.ps.client.rows.rows_ahead import Prefetched
from ringcomm.torch.ps.embeddings import Embedding, EmbeddingBag
from ringcomm.torch.untraced import not_inlined


class EmbeddingCollection(nn.Module):
    """Embeddings and EmbeddingBags whose forward pass asks each server once for all their rows.

        tables = EmbeddingCollection({"user": Embedding(...), "item": EmbeddingBag(...)})
        out = tables({"user": ids, "item": (ids, offsets)})  # {"user": ..., "item": ...}

    Results and gradients are those of the single modules.

    Args:
        modules: by name, or in an order. TypeError: one is not of this package.
    """

    def __init__(self, modules: Mapping[str, nn.Module] | Iterable[nn.Module]) -> None:
        super().__init__()
        self._is_named, self._modules_by_name = isinstance(modules, Mapping), _by_name(modules)
        self.embeddings = nn.Module()  # a ModuleDict refuses names such as "items"
        for name, each in self._modules_by_name.items():
            if not isinstance(each, Embedding | EmbeddingBag):
                raise TypeError(f"EmbeddingCollection: {each} is no embedding of ringcomm.torch.ps")
            try:
                self.embeddings.add_module(name, each)
            except KeyError as error:
                raise ValueError(f"EmbeddingCollection: the name {name!r}: {error}") from error
        self._prefetched = Prefetched()

    @not_inlined
    def forward(self, inputs: Any) -> Any:
        """Return the outputs of the modules: a dict, or a list if they were given in an order.

        Args:
            inputs: by the names of the modules, or in their order: ids, or the tuple of arguments.
        """
        asked, outputs = self._asked(inputs), {}
        pulls = {name: (module.table, keys) for name, (module, keys, *_) in asked.items()}
        pulled = fetched(lambda: self._prefetched.rows(pulls))
        for name, (module, keys, where, arguments) in asked.items():
            module.given = (arguments[0], keys, where, pulled[name])
            try:
                outputs[name] = module(*arguments)
            finally:
                module.given = None
        return outputs if self._is_named else list(outputs.values())

    def prefetch(self, inputs: Any) -> None:
        """Begin to fetch the rows of the next batch; call it before backward() of this one.

        If forward() gets the same ids, it fetches only rows that may be older than the table's mode
        promises: with "async" and ps.SSP(s) those that this worker used since; with SSP
        all, if they may lack a step; with "sync" all, unless this worker has pushed once since.
        With ps.FirstOf(k) nothing is fetched ahead, nor may it be across another's ps.restore().
        Without gradients (torch.no_grad()), no push is expected before forward().
        """
        asked = self._asked(inputs)
        pulls = {name: (module.table, keys) for name, (module, keys, *_) in asked.items()}
        self._prefetched.begin(pulls, pushes_before=1 if torch.is_grad_enabled() else 0)

    def _asked(self, inputs: Any) -> dict[str, tuple[Any, ...]]:
        """Return each module, its distinct ids, the index of each id, and its arguments."""
        names, asked = list(self._modules_by_name), {}
        if isinstance(inputs, torch.Tensor) or not isinstance(inputs, Mapping | Iterable):
            raise TypeError(f"EmbeddingCollection: inputs are {inputs!r}; pass ids for {names}")
        given = _by_name(inputs)
        if given.keys() != set(names):
            raise ValueError(f"EmbeddingCollection: got inputs {list(given)}; pass ids for {names}")
        for name, each in given.items():
            module: Any = self._modules_by_name[name]
            arguments = each if isinstance(each, tuple) else (each,)
            if not (arguments and isinstance(arguments[0], torch.Tensor)):
                raise TypeError(f"EmbeddingCollection: {name} got {each!r}; pass a tensor of ids")
            asked[name] = (module, *module.distinct(arguments[0]), arguments)
        return asked


def _by_name(x: Mapping[str, Any] | Iterable[Any]) -> dict[str, Any]:
    if not isinstance(x, Mapping):
        return {str(number): each for number, each in enumerate(x)}
    for name in x:
        if not isinstance(name, str):
            raise TypeError(f"EmbeddingCollection: the name {name!r} is no string")
    return dict(x)
