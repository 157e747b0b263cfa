"""ps.convert(): moves large embeddings of a model to the servers."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any, Final, TypeVar, cast

import torch
from torch import nn

from ringcomm.codec import Codec
from ringcomm.engine.api import collectives
from ringcomm.ps.optim import Updater
from ringcomm.ps.row_policies import Evict
from ringcomm.ps.session import Session, is_chief, session
from ringcomm.ps.update_modes import Mode
from ringcomm.torch.ps.embeddings import Embedding, EmbeddingBag

M = TypeVar("M", bound=nn.Module)
_WHO: Final = "ps.convert"
_names: weakref.WeakKeyDictionary[Session, tuple[int, set[str]]] = weakref.WeakKeyDictionary()


def convert(
    model: M,
    min_rows: int = 100_000,
    *,
    optimizer: Updater | None = None,
    mode: str | Mode = "async",
    prefix: str = "",
    skip: Collection[str] = (),
    evict: Evict | None = None,
    compression: str | Codec | None = None,
    pull_compression: str | Codec | None = None,
) -> M:
    """Move the rows of a model's large embeddings to the servers; return the model.

    Each nn.Embedding and nn.EmbeddingBag of at least min_rows rows is replaced, in place, by a
    ps.Embedding or ps.EmbeddingBag with the chief's weights. The table has the name of the module.
    Modules that share a weight still share the rows. Collective over the workers, which pass the
    same model.

    Call it before an optimizer is made: the rows are no longer parameters, and the servers update
    them. state_dict() fetches the rows from the servers and has them under their old names, so that
    the original model can load it. load_state_dict() sends them on the chief; other workers wait in
    rc.barrier(). Each forward pass is a push, so a module that runs twice in a step makes two
    updates. With SGD they have the same sum as one update, with other optimizers not.

    Args:
        model: changed in place, unless it is itself an embedding.
        min_rows: embeddings with fewer rows stay as they are.
        optimizer: the servers' update; ps.optim.SGD(0.01) if not given.
        mode: when pushes become updates, see ps.hashtable().
        prefix: beginning of the names of the tables.
        skip: names of modules that stay as they are.
        evict: the rows that are dropped; if they come again, they begin with random values.
        compression: how gradients are sent, see ps.hashtable().
        pull_compression: how rows are sent.

    Raises:
        ValueError, TypeError: an embedding has a feature that ours lack (max_norm,
            scale_grad_by_freq), is frozen, has hooks, has a class of its own, shares its weight
            with another kind of module, or has a name that is taken. The text names the embedding,
            and nothing was changed.
        MismatchError: another worker converts other modules.
    """
    plan = list(_plan(model, min_rows, skip))
    taken = _taken_names(session())
    named = [(prefix + (paths[0] or "embedding"), paths, old) for paths, old in plan]
    for name, _, _ in named:
        if name in taken:
            raise ValueError(
                f"{_WHO}: there is a table {name!r} already, of another model. Pass "
                "prefix='second.' or the like"
            )
    for name, paths, old in named:
        options = {
            "name": name, "optimizer": optimizer, "mode": mode, "evict": evict,
            "compression": compression, "pull_compression": pull_compression,
        }  # fmt: skip
        new = _made(old, options)
        taken.add(name)
        if not session().takes_what_servers_have:  # then they have the rows
            if is_chief():
                new.load(old.weight)
            collectives.barrier(name=f"{_WHO}[{name}]", group=session().group)
        new.train(old.training)
        new.is_in_state_dict = True
        for path in paths:
            if not path:
                return new  # type: ignore[return-value]  # the model is the embedding
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, new)
    return model


def _taken_names(current: Session) -> set[str]:
    """Return the names of earlier models' tables.

    An evaluator, whose function is called again after a recovery, may convert its model again.
    """
    attempt = current.n_recovered if current.is_evaluator else 0
    known = _names.get(current)
    if known is None or known[0] != attempt:
        known = _names[current] = attempt, set()
    return known[1]


def _plan(
    model: nn.Module, min_rows: int, skip: Collection[str]
) -> Iterator[tuple[list[str], Any]]:
    """Yield (paths, module) of the modules to replace; a shared module has several paths."""
    paths_of: dict[torch.Tensor, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            paths_of.setdefault(parameter, []).append((f"{path}.{key}".lstrip("."), module))
    known = {path for path, _ in model.named_modules(remove_duplicate=False)}
    if unknown := set(skip) - known:
        raise ValueError(f"{_WHO}: skip names {sorted(unknown)}, and the model has no such module")
    done: set[torch.Tensor] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or path in skip:
            continue
        if module.num_embeddings < min_rows or module.weight in done:
            continue
        done.add(module.weight)
        sharers = paths_of[module.weight]
        _require_convertible(path, module)
        for other, sharer in sharers:
            _require_alike(path, module, other, sharer)
        paths = [other.rpartition(".")[0] for other, _ in sharers]
        if kept := set(paths) & set(skip):
            raise ValueError(
                f"{_WHO}: {path} shares its weight with {sorted(kept)}, which is skipped. Skip both"
            )
        yield paths, module


def _require_convertible(path: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    name = path or "the model"
    wrong = ""
    if type(module) not in (nn.Embedding, nn.EmbeddingBag):
        raise TypeError(
            f"{_WHO}: {name} is a {type(module).__name__}, whose forward() may do something else "
            f"than {type(module).__mro__[1].__name__}'s. Pass skip=[{path!r}]"
        )
    if module.max_norm is not None:
        wrong = f"has max_norm={module.max_norm}: rows on the servers are not renormalised"
    elif module.scale_grad_by_freq:
        wrong = "has scale_grad_by_freq=True: servers do not know how often an id came"
    elif not module.weight.requires_grad:
        wrong = "is frozen: servers would train it"
    elif module.weight.dtype not in (torch.float32, torch.float64):
        wrong = f"is of {module.weight.dtype}: servers keep float32 and float64"
    elif _hooks_of(module):
        wrong = f"has hooks ({', '.join(_hooks_of(module))}), which would be lost"
    elif isinstance(module, nn.Embedding) and _has_padding_values(module):
        wrong = f"has a row of padding ({module.padding_idx}) that is not 0, and ours reads as 0"
    if wrong:
        raise ValueError(f"{_WHO}: {name} {wrong}. Change it before, or pass skip=[{path!r}]")


def _has_padding_values(module: nn.Embedding) -> bool:
    index = module.padding_idx
    return index is not None and bool(module.weight[index].any())


def _hooks_of(module: nn.Module) -> list[str]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [kind[1:] for kind in kinds if getattr(module, kind)]


def _require_alike(path: str, module: Any, other: str, sharer: nn.Module) -> None:
    """Raise ValueError unless one new module can replace two that share a weight."""
    if sharer is module:
        return
    if type(sharer) is not type(module):
        raise ValueError(
            f"{_WHO}: {path} shares its weight with {other} of a {type(sharer).__name__}, which "
            f"needs the weight on this worker. Untie them, or pass skip=[{path!r}]"
        )
    _require_convertible(other.rpartition(".")[0], sharer)  # type: ignore[arg-type]  # it is one
    names = ("padding_idx", "mode", "include_last_offset")
    for name in names:
        mine, theirs = getattr(module, name, None), getattr(sharer, name, None)
        if mine != theirs:
            raise ValueError(
                f"{_WHO}: {path} and {other} share their weight, with {name}={mine!r} and "
                f"{theirs!r}. Let them be alike, or pass skip= for both"
            )


def _made(old: nn.Embedding | nn.EmbeddingBag, options: dict[str, Any]) -> Embedding | EmbeddingBag:
    options = {**options, "padding_idx": old.padding_idx, "dtype": old.weight.dtype}
    size = old.num_embeddings, old.embedding_dim
    if isinstance(old, nn.Embedding):
        return Embedding(*size, **options)
    bag = cast(Any, old.mode)
    return EmbeddingBag(*size, bag=bag, include_last_offset=old.include_last_offset, **options)
