"""prefetching(): lets the rows of the next batch be fetched while one is trained on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, Final, Protocol

from ringcomm.data.loader import Loader

_END: Final = object()


class Prefetches(Protocol):
    """A ps.EmbeddingCollection of torch, or something with its prefetch()."""

    def prefetch(self, inputs: Any) -> object:
        """Begin to fetch the rows of the next forward pass."""


class _Prefetching:
    def __init__(
        self, loader: Iterable[Any], collection: Prefetches, ids: Callable[[Any], Any]
    ) -> None:
        self._loader, self._collection, self._ids = loader, collection, ids

    def __len__(self) -> int:
        assert isinstance(self._loader, Sized)
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._loader, Loader):  # it sets the weight of the batch that it returns
            yield from self._loader.iterate(self._begin)
            return
        for batch, following in itertools.pairwise(itertools.chain(self._loader, [_END])):
            if following is not _END:
                self._begin(following)
            yield batch

    def _begin(self, batch: Any) -> None:
        self._collection.prefetch(self._ids(batch))


def prefetching(
    loader: Iterable[Any], collection: Prefetches, *, ids: Callable[[Any], Any]
) -> Iterable[Any]:
    """Return the batches of a loader; rows of the next batch are fetched while one is trained on.

        for batch in ps.prefetching(loader, tables, ids=lambda batch: batch["ids"]):
            loss(model(tables(batch["ids"])), batch["y"]).backward()
            optimizer.step()

    It takes one batch ahead, and raises an error of the loader one batch earlier. Each iteration is
    one of the loader; len() is that of the loader.

    Args:
        loader: torch's DataLoader, rc.data.Loader, or any iterable of batches.
        collection: fetches the rows, a ps.EmbeddingCollection of ringcomm.torch.
        ids: returns for a batch what forward() of the collection gets.

    Raises:
        TypeError: collection has no prefetch(), or ids is no function.
    """
    if not hasattr(collection, "prefetch"):
        raise TypeError(f"prefetching: collection must have prefetch(), and {collection!r} has not")
    if not callable(ids):
        raise TypeError(f"prefetching: ids must be a function of a batch, not {ids!r}")
    return _Prefetching(loader, collection, ids)
