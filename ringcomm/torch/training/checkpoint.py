"""Checkpoint: the state of a training job in files that survive whatever ends the job."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import torch

from ringcomm.data.sampler import ShardedSampler
from ringcomm.engine.api import collectives
from ringcomm.engine.api.world import rank, size
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.files import BrokenFileError, checksum
from ringcomm.torch.optim.averaging import StateSharding
from ringcomm.torch.training import checkpoint_files as files
from ringcomm.torch.training.random_state import random_state, set_random_state
from ringcomm.torch.training.state import broadcast_tree

P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("ringcomm")
_OURS: Final = "ringcomm"  # the entry beside the user's parts
_FORMAT: Final = 1


@dataclass(frozen=True)
class Restored:
    """Result of Checkpoint.restore().

    Attributes:
        step: as passed to save().
        size: number of ranks that saved it.
        values: the parts without a state_dict(), by name.
        shard: what this rank passed as `shard`; None if nothing was, or on another number of ranks.
        shards: the files of all ranks' shards, in rank order, for torch.load().
    """

    step: int
    size: int
    values: dict[str, Any]
    shard: Any
    shards: tuple[Path, ...]


class Checkpoint:
    """Saves and restores model, optimizer, samplers and random generators of all ranks.

        checkpoint = hvd.Checkpoint("runs/digits", keep=3)
        found = checkpoint.restore(model=model, optimizer=optimizer, sampler=loader)
        ...
        checkpoint.save(step, model=model, optimizer=optimizer, sampler=loader, best=0.98)

    A checkpoint is a file `step-<n>.pt` that rank 0 writes; torch.load(file)["model"] is the
    model's state_dict(), anywhere and without ringcomm. It is written under another name, flushed
    to the disk and renamed: a job that is killed meanwhile leaves the earlier ones as they were. It
    can be restored on any number of ranks. Only rank 0 must see the folder, but for shards.

    Args:
        folder: is made if it is not there; of one job at a time.
        keep: the newest so many stay; None: all.

    Raises:
        ValueError: keep is less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpoint: keep is at least 1, or None, not {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def steps(self) -> list[int]:
        """Return the steps of which this rank sees a checkpoint, in order; local."""
        return files.steps_in(self.folder)

    def latest(self) -> int | None:
        """Return the last of them, None if there is none; local."""
        return max(self.steps(), default=None)

    def save(
        self,
        step: int,
        /,
        *,
        sampler: Any = None,
        consumed: int | None = None,
        rng: bool = True,
        shard: Any = None,
        **parts: Any,
    ) -> Path:
        """Write a checkpoint, and return its file once it is on the disk. Collective.

        Args:
            step: its number, at least 0; a checkpoint of that number is replaced.
            sampler: a ShardedSampler or Loader: where each rank is.
            consumed: how many of its samples this rank has trained on in this epoch. Needed in the
                middle of an epoch of a ShardedSampler, which cannot know: a DataLoader with workers
                takes samples ahead. In the last steps of an epoch those workers may have taken all
                of them: then, too, only this says that the epoch is not over. A Loader counts.
            rng: also the state of the global random generators of each rank: torch's for the CPU,
                numpy's, Python's.
            shard: what this rank alone has: tensors, in lists and dicts, of which it writes a file
                of its own. Given by all ranks or none. The folder must be one that all ranks see.
            parts: by any name, what is alike on all ranks: whatever has a state_dict(), as
                model=, optimizer=, schedule=, scaler=; or numbers, texts, lists, dicts, tensors.

        Raises:
            MismatchError: ranks save different steps.
            RingcommError: on every rank, if one could not write; the text says which, and why.
            TypeError: on every rank, if a part is of a class that torch.load(weights_only=True)
                would refuse.
            ValueError: step is negative, or a part is called "ringcomm".
        """
        step = _natural(step)
        _refuse_our_name(parts)
        shared = {name: part for name, part in parts.items() if isinstance(part, StateSharding)}
        states = {name: part.state_dict(root_rank=0) for name, part in shared.items()}
        attempts = _Attempts(f"{self.folder}, step {step}")
        mine = {
            "step": step,
            "sampler": attempts.do(_place_in, sampler, consumed),
            "rng": random_state() if rng else None,
            "shard": attempts.do(self._write_shard, step, shard),
        }
        ranks = attempts.gather(mine)
        _require_same([theirs.pop("step") for theirs in ranks], self.folder)
        path = files.main_path(self.folder, step)
        if rank() == 0:
            attempts.do(self._write_main, path, step, ranks, parts, states)
        attempts.gather(None)
        return path

    def restore(
        self, *, step: int | None = None, sampler: Any = None, rng: bool = True, **parts: Any
    ) -> Restored | None:
        """Load a checkpoint into these objects, on every rank. Collective.

        Args:
            step: which one; None: the last whose checksums are right. A broken one is skipped with
                a warning.
            sampler: as for save(); goes on where the ranks were, on any number of ranks.
            rng: restore random generators, if there are as many ranks as there were; else they go
                on as they are, with a warning.
            parts: objects with load_state_dict(), by the names that save() had.

        Returns:
            What was found; None if the folder has no checkpoint and step is None.

        Raises:
            RingcommError: on every rank, if none can be used: the text says what is wrong with
                each; or if one has not all that is asked for, or the model is another one. Nothing
                has been loaded then.
        """
        _refuse_our_name(parts)
        attempts = _Attempts(str(self.folder))
        content = None
        if rank() == 0:
            content = attempts.do(self._find, step, [*parts], sampler is not None)
        attempts.gather(None)
        content = broadcast_tree(content, name="checkpoint")
        if content is None:
            return None
        ours = content[_OURS]
        attempts.do(_require_fit, content, parts)
        shard, paths = attempts.do(self._read_shard, ours) or (None, ())
        attempts.gather(None)
        for name, part in parts.items():
            part.load_state_dict(content[name])
        if sampler is not None:
            sampler.load_state_dict(ours["sampler"])
        if rng:
            _restore_random_states(ours["rng"])
        values = {name: content[name] for name in ours["values"]}
        return Restored(ours["step"], ours["size"], values, shard, paths)

    def _write_main(
        self,
        path: Path,
        step: int,
        ranks: list[Any],
        parts: Mapping[str, Any],
        states: Mapping[str, Any],
    ) -> None:
        """Write what makes it a checkpoint; of rank 0, while the others wait."""
        ours: dict[str, Any] = {"format": _FORMAT, "step": step, "size": size()}
        ours |= {what: [each[what] for each in ranks] for what in ("sampler", "rng", "shard")}
        values = ours["values"] = [
            name for name, p in parts.items() if not hasattr(p, "state_dict")
        ]
        content = {
            name: states[name] if name in states else p if name in values else p.state_dict()
            for name, p in parts.items()
        }
        files.write(path, {**content, _OURS: ours})
        files.tidy(self.folder, self.keep)

    def _write_shard(self, step: int, shard: Any) -> list[Any] | None:
        """Return name, length and checksum of what this rank has written."""
        if shard is None:
            return None
        path = files.shard_path(self.folder, step, rank(), size())
        files.write(path, {"shard": shard})
        return [path.name, *checksum(path)]

    def _find(self, step: int | None, names: list[str], has_sampler: bool) -> dict[str, Any] | None:
        """Return of a checkpoint what is asked for, and its values; of rank 0."""
        problems = []
        for each in self.steps()[::-1] if step is None else [_natural(step)]:
            path = files.main_path(self.folder, each)
            try:
                content = _checked(path, files.read(path))
            except BrokenFileError as error:
                problems.append(str(error))
                continue
            for problem in problems:
                _log.warning("checkpoint skipped: %s", problem)
            _require_parts(path, content, names, has_sampler=has_sampler)
            return {name: content[name] for name in {*names, *content[_OURS]["values"], _OURS}}
        if problems:
            raise BrokenFileError("; ".join(problems))
        return None

    def _read_shard(self, ours: Mapping[str, Any]) -> tuple[Any, tuple[Path, ...]]:
        written = ours["shard"]
        if any(each is None for each in written):
            return None, ()
        paths = tuple(self.folder / name for name, _, _ in written)
        if ours["size"] != size():
            return None, paths
        path, (_, *expected) = paths[rank()], written[rank()]
        if not path.exists():
            raise BrokenFileError(
                f"{path} is not there: all ranks must see the folder in which they have shards"
            )
        found = list(checksum(path))
        if found != expected:
            raise BrokenFileError(f"{path}: has changed: {expected} was written, {found} is there")
        return files.read(path)["shard"], paths


class _Attempts:
    """Collects errors of one rank, to raise them on all ranks."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._error: Exception | None = None

    def do(self, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return what the action returns, None if it fails; local."""
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised by gather(), on all ranks
            self._error = error
            return None

    def gather(self, mine: Any) -> list[Any]:
        """Return what all ranks have. Collective; raises the first rank's error on all."""
        error = self._error
        failure = None if error is None else (isinstance(error, TypeError), _words(error))
        reports = collectives.allgather_object((failure, mine))
        for r, (failure, _) in enumerate(reports):
            if failure is not None:
                is_type_error, words = failure
                kind = TypeError if is_type_error else RingcommError
                raise kind(f"checkpoint[{self._what}]: rank {r}: {words}") from error
        return [theirs for _, theirs in reports]


def _require_same(steps: list[int], folder: Path) -> None:
    other = next((r for r, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise MismatchError(
            f"checkpoint[{folder}]: rank 0 saves step {steps[0]}, rank {other} step "
            f"{steps[other]}. "
            "Every rank saves the same step"
        )


def _words(error: Exception) -> str:
    if isinstance(error, BrokenFileError | TypeError):
        return str(error)
    return f"{type(error).__name__}: {error}. What was saved before is as it was"


def _place_in(sampler: Any, consumed: int | None) -> Any:
    """Return where this rank is in its samples; ValueError if that cannot be known."""
    if not isinstance(sampler, ShardedSampler):
        if consumed is not None:
            raise ValueError(
                f"consumed={consumed} is for a ShardedSampler, and sampler is "
                f"{'None' if sampler is None else f'a {type(sampler).__name__}'}: leave it out"
            )
        return None if sampler is None else sampler.state_dict()
    if consumed is None and sampler.is_under_way:
        n = sampler.state_dict()["taken"]
        raise ValueError(
            f"sampler is in the middle of epoch {sampler.epoch}: {n} of {len(sampler)} samples "
            "have been handed out, but a DataLoader with workers takes them ahead, and those that "
            "were not trained on would be lost. Pass consumed=, the samples that this rank has "
            "trained on in this epoch (steps * batch size), or a rc.data.Loader, which counts them"
        )
    return sampler.state_dict(consumed)


def _natural(step: int) -> int:
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"Checkpoint: a step is at least 0, not {step}")
    return step


def _refuse_our_name(parts: Mapping[str, Any]) -> None:
    if _OURS in parts:
        raise ValueError(f"Checkpoint: no part can be called {_OURS!r}, which has a use of its own")


def _checked(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    ours = content.get(_OURS)
    if not isinstance(ours, dict) or "format" not in ours:
        raise BrokenFileError(f"{path}: was not written by ringcomm's Checkpoint")
    if ours["format"] != _FORMAT:
        raise BrokenFileError(
            f"{path}: has format {ours['format']}, and this version reads {_FORMAT}: use the "
            "version of ringcomm that wrote it, or a newer one"
        )
    return content


def _require_parts(
    path: Path, content: Mapping[str, Any], names: list[str], *, has_sampler: bool
) -> None:
    missing = [name for name in names if name not in content]
    if missing:
        known = ", ".join(name for name in content if name != _OURS)
        raise BrokenFileError(f"{path}: has no {', '.join(missing)}; it has {known}")
    if has_sampler and any(each is None for each in content[_OURS]["sampler"]):
        raise BrokenFileError(f"{path}: was saved without sampler=")


def _require_fit(content: Mapping[str, Any], parts: Mapping[str, Any]) -> None:
    """Refuse the weights of another model, before any is loaded."""
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            mine, saved = part.state_dict(), content[name]
            for key in [*mine, *saved]:
                here, there = _shape(mine, key), _shape(saved, key)
                if here != there:
                    raise BrokenFileError(
                        f"{name} does not fit: {key} is {there} in the checkpoint, {here} here"
                    )


def _shape(tree: Mapping[str, Any], key: str) -> str:
    return str(tuple(getattr(tree[key], "shape", ()))) if key in tree else "missing"


def _restore_random_states(states: list[Any]) -> None:
    if any(state is None for state in states):
        return
    if len(states) == size():
        set_random_state(states[rank()])
    elif rank() == 0:
        _log.warning(
            "the checkpoint has random generators of %d ranks, this job %d: they go on as they are",
            len(states),
            size(),
        )
