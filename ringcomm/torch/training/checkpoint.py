"""Checkpoint: saves the state of a training job to files, and restores it."""

from __future__ import annotations

import logging
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from ringcomm.data.sampler import ShardedSampler
from ringcomm.engine.api.init_rank_size import engine, rank, size
from ringcomm.engine.api.one_error_for_all import gather_or_raise, raise_together
from ringcomm.engine.api.require_nobody_in_join import require_nobody_in_join
from ringcomm.engine.control.live_parameters_and_callbacks import PROGRAM
from ringcomm.errors import MismatchError, RingcommError
from ringcomm.regular_files import BrokenFileError, checksum
from ringcomm.status.run_events import record_event
from ringcomm.torch.optim.averaging_optimizer import StateSharding
from ringcomm.torch.training import checkpoint_files as files
from ringcomm.torch.training.broadcast_states import broadcast_tree


# --- states of random numbers ---------------------------------------------------------------------
def random_state() -> dict[str, Any]:
    """Return the states of the generators as numbers and texts, which any file format can hold."""
    version, words, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    assert isinstance(of_numpy, dict)
    state = of_numpy["state"]
    return {
        "python": [version, list(words), gauss],
        "numpy": {**of_numpy, "state": {**state, "key": state["key"].tolist()}},
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: dict[str, Any]) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


P = ParamSpec("P")
R = TypeVar("R")
_log = logging.getLogger("ringcomm")
_OURS: Final = "ringcomm"  # name of our entry in the file, beside the user's parts
_FORMAT: Final = 1


@dataclass(frozen=True)
class Restored:
    """Result of Checkpoint.restore().

    Attributes:
        step: the step that was passed to save().
        size: number of ranks that saved the checkpoint.
        values: the parts that have no state_dict(), by name.
        shard: the `shard` that this rank passed to save(); None if the number of ranks has changed
            since, or ranks passed none.
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
    model's state_dict(), also without ringcomm. save() writes it under another name, flushes it to
    the disk and renames it: a job that is killed during save() leaves earlier checkpoints intact.
    Any number of ranks can restore it. Only rank 0 needs the folder, unless ranks save shards.

    Args:
        folder: folder of the files, which one job at a time may use; save() makes it if need be.
        keep: number of checkpoints to keep, those of the highest steps; None: all. The one that was
            saved last stays, too. save() warns if its step is not the highest.

    Raises:
        ValueError: keep is less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = 3) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"Checkpoint: keep is at least 1, or None, not {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self._has_warned_of_later = False

    def steps(self) -> list[int]:
        """Return the steps whose checkpoints this rank sees, in order; local."""
        return files.steps_in(self.folder)

    def latest(self) -> int | None:
        """Return the last step whose checkpoint this rank sees; None if there is none. Local."""
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
        """Write a checkpoint, and return its path once it is on the disk. Collective.

        Args:
            step: number of the checkpoint, at least 0; an earlier one of that number is replaced.
            sampler: a ShardedSampler or Loader, whose position on each rank is saved.
            consumed: number of samples that this rank has trained on in this epoch. Needed for a
                ShardedSampler in the middle of an epoch, which cannot know the number: workers of a
                DataLoader fetch samples ahead, in the last steps even all samples of the epoch, and
                then save() cannot tell that it is missing. A Loader needs no `consumed`.
            rng: True: save the state of each rank's global random generators too: torch's for the
                CPU, numpy's and Python's.
            shard: data of this rank alone: tensors, also in lists and dicts. The rank writes it to
                its own file. All ranks pass a shard, or none; all of them must see the folder.
            parts: data that is the same on all ranks, by any name: objects with a state_dict(),
                such as model=, optimizer=, schedule=, scaler=; or numbers, texts, lists, dicts and
                tensors.

        Raises:
            MismatchError: ranks save different steps, or only some of them pass a shard.
            RingcommError: on every rank, if one of them could not write; the text names this rank
                and the cause.
            TypeError: on every rank, if torch.load(weights_only=True) would refuse the class of a
                part.
            ValueError: step is negative, or a part is called "ringcomm".
        """
        step = _natural(step)
        _refuse_our_name(parts)
        shared = {name: part for name, part in parts.items() if isinstance(part, StateSharding)}
        states = {name: part.state_dict(root_rank=0) for name, part in shared.items()}
        attempts = _Attempts(f"{self.folder}, step {step}")
        mine = {
            "step": step,
            "sampler": attempts.do(_position_of, sampler, consumed),
            "rng": random_state() if rng else None,
            "shard": attempts.do(self._write_shard, step, shard),
        }
        ranks = attempts.gather(mine)
        _require_same([theirs.pop("step") for theirs in ranks], self.folder)
        _require_all_or_none([theirs["shard"] for theirs in ranks], self.folder)
        path = files.main_path(self.folder, step)
        if rank() == 0:
            attempts.do(self._write_main, path, step, ranks, parts, states)
        attempts.gather(None)
        if rank() == 0:
            record_event("checkpoint", f"checkpoint of step {step}: {path}")
        return path

    def restore(
        self, *, step: int | None = None, sampler: Any = None, rng: bool = True, **parts: Any
    ) -> Restored | None:
        """Load a checkpoint into these objects, on every rank. Collective.

        Args:
            step: number of the checkpoint; None: the last one that is intact. A damaged checkpoint
                is skipped with a warning. It is an error if another rank sees a later one in its
                folder than rank 0 does.
            sampler: as for save(). It continues at the saved position, on any number of ranks.
            rng: True: restore the random generators. If the number of ranks has changed, they stay
                as they are, with a warning.
            parts: objects with load_state_dict(), by the names that save() got.

        Returns:
            The step, the values and more; None if step is None and the folder has no checkpoint.

        Raises:
            RingcommError: on every rank, if all checkpoints are damaged, the checkpoint lacks a
                part, or the model does not fit. The text gives each cause. Nothing is loaded then.
                Likewise if load_state_dict() of a part fails on one; some may be loaded then.
        """
        _refuse_our_name(parts)
        intact = self._read_intact(step, parts, has_sampler=sampler is not None)
        if intact is None:
            return None
        content, shard, paths = intact
        ours = content[_OURS]
        attempts = _Attempts(str(self.folder))
        attempts.do(_load, content, parts, sampler, rng=rng)
        attempts.gather(None)  # one that cannot go on would be taken for a loss, in an elastic job
        engine().control.go_on_from(ours.get("completed", 0))  # those of 0.1.0 lack it
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
        """Write the main file; rank 0 calls this while the other ranks wait."""
        ours: dict[str, Any] = {"format": _FORMAT, "step": step, "size": size()}
        ours["completed"] = PROGRAM.n_steps
        ours |= {key: [each[key] for each in ranks] for key in ("sampler", "rng", "shard")}
        values = [name for name, part in parts.items() if not hasattr(part, "state_dict")]
        ours["values"] = values
        content = {
            name: states[name] if name in states else p if name in values else p.state_dict()
            for name, p in parts.items()
        }
        files.write(path, {**content, _OURS: ours}, shows_bar=True)
        files.tidy(self.folder, self.keep, step, [each[0] for each in ours["shard"] if each])
        later = [each for each in self.steps() if each > step]
        if later and not self._has_warned_of_later:
            self._has_warned_of_later = True
            _log.warning(
                "%s has checkpoints of later steps than %d, which was saved: %s. restore() takes "
                "step %d unless it gets step=. Delete those that are of no use",
                self.folder,
                step,
                ", ".join(map(str, later)),
                later[-1],
            )

    def _write_shard(self, step: int, shard: Any) -> list[Any] | None:
        """Write this rank's shard; return the file's name, length and checksum."""
        if shard is None:
            return None
        path = files.new_shard_path(self.folder, step, rank(), size())
        files.write(path, {"shard": shard})
        return [path.name, *checksum(path)]

    def _read_intact(
        self, step: int | None, parts: Mapping[str, Any], *, has_sampler: bool
    ) -> tuple[dict[str, Any], Any, tuple[Path, ...]] | None:
        """Return the content, this rank's shard, and all shards' paths; None: no checkpoint.

        Without a step, skips a checkpoint of which any rank cannot use its file.
        """
        below: int | None = None  # the step of the last one that was skipped
        problems: list[str] = []
        while True:
            attempts = _Attempts(str(self.folder))
            content = None
            if rank() == 0:
                content = attempts.do(self._find, step, below, [*parts], has_sampler, problems)
            latest = attempts.gather(attempts.do(self.latest) if step is None else None)
            if below is None:
                self._require_newest(latest)
            content = broadcast_tree(content, name="checkpoint")
            if content is None:
                return None
            ours = content[_OURS]
            attempts.do(_require_fit, content, parts)
            attempts.gather(None)
            shard, paths = attempts.do(self._read_shard, ours) or (None, ())
            is_seen = files.main_path(self.folder, ours["step"]).exists()
            damage = attempts.take_damage() if step is None and is_seen else None
            reports = attempts.gather(damage)
            damages = [f"rank {r}: {each}" for r, each in enumerate(reports) if each]
            if not damages:
                break
            problems.append(damages[0])
            below = ours["step"]
        for problem in problems if rank() == 0 else []:
            _log.warning("checkpoint skipped: %s", problem)
        return content, shard, paths

    def _require_newest(self, latest: list[int | None]) -> None:
        """Raise RingcommError on all ranks if one sees a later checkpoint than rank 0."""
        for r, each in enumerate(latest):
            if each is not None and (latest[0] is None or each > latest[0]):
                mine = "none" if latest[0] is None else f"step {latest[0]} as the last one"
                transport = engine().transport
                raise_together(RingcommError(
                    f"checkpoint[{self.folder}]: {transport.label(0)} sees {mine}, and "
                    f"{transport.label(r)} sees step {each}: the folder is not the same there. "
                    "Use one that all ranks share; or copy what is there to where rank 0 runs, or "
                    "remove it if it is of another job"
                ))  # fmt: skip

    def _find(
        self,
        step: int | None,
        below: int | None,
        names: list[str],
        has_sampler: bool,
        problems: list[str],
    ) -> dict[str, Any] | None:
        """Return the named parts of a checkpoint, and its values; only rank 0 calls this.

        Without a step it is the last intact one, of a step below `below` unless that is None.
        Appends to `problems` what is wrong with those that it skips.
        """
        steps = [each for each in self.steps()[::-1] if below is None or each < below]
        for each in steps if step is None else [_natural(step)]:
            path = files.main_path(self.folder, each)
            try:
                content = _checked(path, files.read(path, shows_bar=True))
            except BrokenFileError as error:
                problems.append(str(error))
                continue
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
        try:
            found = list(checksum(path, expected[0]))
        except BrokenFileError as error:
            raise BrokenFileError(f"{path} {error}") from error
        if found != expected:
            raise BrokenFileError(f"{path}: has changed: {expected} was written, {found} is there")
        return files.read(path)["shard"], paths


class _Attempts:
    """Catches an error of one rank, and raises it on all ranks."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._error: Exception | None = None

    def do(self, action: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Return the result of an action; None if it raises. Local."""
        try:
            return action(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - raised by gather(), on all ranks
            self._error = error
            return None

    def take_damage(self) -> str | None:
        """Return the text of the error and drop it, if a file cannot be used; else None. Local."""
        error = self._error
        if not isinstance(error, BrokenFileError):
            return None
        self._error = None
        return str(error)

    def gather(self, mine: Any) -> list[Any]:
        """Return the objects of all ranks; if actions failed, raise the first error. Collective."""
        error = self._error
        if error is not None and not isinstance(error, BrokenFileError | TypeError):
            text = f"{type(error).__name__}: {error}. Checkpoints that exist are unchanged"
            error = RingcommError(text)
        where = f"checkpoint[{self._where}]"
        reports = gather_or_raise(where, (mine,), error)
        require_nobody_in_join(where, reports, range(size()))
        return [each[0] for each in reports if each is not None]


def _require_same(steps: list[int], folder: Path) -> None:
    other = next((r for r, step in enumerate(steps) if step != steps[0]), None)
    if other is not None:
        raise MismatchError(
            f"checkpoint[{folder}]: rank 0 saves step {steps[0]}, rank {other} step "
            f"{steps[other]}. Save the same step on every rank"
        )


def _require_all_or_none(shards: list[Any], folder: Path) -> None:
    without = [r for r, shard in enumerate(shards) if shard is None]
    if without and len(without) < len(shards):
        raise MismatchError(
            f"checkpoint[{folder}]: ranks {without} pass no shard=, the others do. Pass one on "
            "every rank, such as an empty list, or on none"
        )


def _position_of(sampler: Any, consumed: int | None) -> Any:
    """Return the position of a sampler. Raises ValueError if it is not known."""
    if not isinstance(sampler, ShardedSampler):
        if consumed is not None:
            raise ValueError(
                f"consumed={consumed} is for a ShardedSampler, and sampler is "
                f"{'None' if sampler is None else f'a {type(sampler).__name__}'}: omit consumed"
            )
        return None if sampler is None else sampler.state_dict()
    if consumed is None and sampler.is_ahead:
        n = sampler.state_dict()["taken"]
        raise ValueError(
            f"sampler is in the middle of epoch {sampler.epoch}: {n} of {len(sampler)} samples "
            "have been handed out, but what takes them may do so ahead, as a DataLoader with "
            "workers does, and those that were not trained on would be lost. Pass consumed=, the "
            "samples that this rank has trained on in this epoch (steps * batch size), or a "
            "rc.data.Loader, which counts them. A DataLoader with num_workers=0 needs neither"
        )
    return sampler.state_dict(consumed)


def _natural(step: int) -> int:
    step = operator.index(step)
    if step < 0:
        raise ValueError(f"Checkpoint: a step is at least 0, not {step}")
    return step


def _refuse_our_name(parts: Mapping[str, Any]) -> None:
    if _OURS in parts:
        raise ValueError(f"Checkpoint: no part can be called {_OURS!r}: ringcomm uses this name")


def _checked(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    ours = content.get(_OURS)
    if not isinstance(ours, dict) or "format" not in ours:
        raise BrokenFileError(f"{path}: was not written by ringcomm's Checkpoint")
    if ours["format"] != _FORMAT:
        raise BrokenFileError(
            f"{path}: has format {ours['format']}, and this version reads {_FORMAT}: use the "
            "version of ringcomm that wrote it, or a newer one"
        )
    step = ours.get("step")
    if type(step) is not int or path != files.main_path(path.parent, step):
        raise BrokenFileError(f"{path}: is of step {step!r}, and a checkpoint keeps its name")
    if not _is_whole(content, ours):
        raise BrokenFileError(f"{path}: has not what ringcomm's Checkpoint writes in it")
    return content


def _is_whole(content: Mapping[Any, Any], ours: Mapping[Any, Any]) -> bool:
    """Return True if our entry says which values, and what of each rank, the checkpoint has."""
    n, values, shards = ours.get("size"), ours.get("values"), ours.get("shard")
    if type(n) is not int or not isinstance(values, list):
        return False
    of_ranks = (shards, ours.get("sampler"), ours.get("rng"))
    if n < 1 or not all(isinstance(each, list) and len(each) == n for each in of_ranks):
        return False
    are_there = all(isinstance(name, str) and name in content for name in values)
    return are_there and all(each is None or files.is_shard(each) for each in shards or ())


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
    """Raise BrokenFileError if names or shapes of a model's weights are not the checkpoint's."""
    for name, part in parts.items():
        if isinstance(part, torch.nn.Module):
            mine, saved = part.state_dict(), content[name]
            for key in [*mine, *saved]:
                if key in mine and key in saved and is_lazy(mine[key]):
                    continue  # it takes the saved shape
                here, there = _shape(mine, key), _shape(saved, key)
                if here != there:
                    raise BrokenFileError(
                        f"{name} does not fit: {key} is {there} in the checkpoint, {here} here"
                    )


def _shape(tree: Mapping[str, Any], key: str) -> str:
    return str(tuple(getattr(tree[key], "shape", ()))) if key in tree else "missing"


def _load(content: Mapping[str, Any], parts: Mapping[str, Any], sampler: Any, *, rng: bool) -> None:
    for name, part in parts.items():
        part.load_state_dict(content[name])
    if sampler is not None:
        sampler.load_state_dict(content[_OURS]["sampler"])
    if rng:
        _restore_random_states(content[_OURS]["rng"])


def _restore_random_states(states: list[Any]) -> None:
    if any(state is None for state in states):
        return
    if len(states) == size():
        set_random_state(states[rank()])
    elif rank() == 0:
        _log.warning(
            "the checkpoint has random generators of %d ranks, and this job has %d ranks: their "
            "generators stay as they are. All else is restored",
            len(states),
            size(),
        )
