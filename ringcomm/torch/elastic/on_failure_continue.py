"""DistributedOptimizer(on_failure="continue"): a lost rank costs the others one step.

A rank counts its calls of step(). Of the next ones, it knows ahead that `n_ahead` make no update.
The sum of both says which updates its weights contain: it is the version of the weights. All ranks
with the same version have the same weights, bit for bit.

A failed reduction is noted, and the gradients become zero; nothing is raised. The ranks meet in
step(), form the next view, and compare versions. A rank that had the mean of a step before the
failure has applied it, and is one version ahead: the others take its weights and state, and their
step() makes no update. If a rank has begun the step that follows the newest version, no rank that
is left applies that step: its gradients are lost on some of them. So all calls of step() still
pair up: as many as the program makes on each rank.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch.optim import Optimizer

from ringcomm.elastic.run import end_of_view, is_running, warn_unless_elastic
from ringcomm.elastic.views import begin_in_new_view, view
from ringcomm.engine.api import collectives
from ringcomm.engine.api.begin_next_view import await_streams, heal
from ringcomm.engine.api.init_rank_size import rank, size
from ringcomm.errors import PeerFailedError
from ringcomm.torch.backward.collective_tasks import CollectiveTask
from ringcomm.torch.backward.parameter_hooks import Named
from ringcomm.torch.horovod.process_sets import global_process_set
from ringcomm.torch.optim.averaging_optimizer import OUR_ATTRIBUTES, AveragingOptimizer
from ringcomm.torch.optim.distributed_optimizer_options import GradientOptions
from ringcomm.torch.optim.gradient_slot import GradientSlot
from ringcomm.torch.optim.reducer import GradientReducer
from ringcomm.torch.optim.wrapping import derive, underlying
from ringcomm.torch.training.broadcast_states import broadcast_tree

_log = logging.getLogger("ringcomm")
T = TypeVar("T", bound=Optimizer)
_optimizers: list[weakref.ref[ContinuingOptimizer]] = []  # in the same order on all ranks


def with_continuation(
    optimizer: T, named: Named, options: GradientOptions, passes: int, known: Named = ()
) -> T:
    """Return a DistributedOptimizer that goes on after a loss.

    Raises:
        ValueError: an option does not go with it.
    """
    refused = {
        "process_set": options.process_set is not global_process_set,
        "shard_state=1": options.is_sharded,
        "sync_weights=False": not options.sync_weights,
    }
    for name, is_given in refused.items():
        if is_given:
            raise ValueError(
                f'DistributedOptimizer: on_failure="continue" does not go with {name}: after a '
                "loss all ranks get the same weights and state. Use elastic.run (docs/elastic.md)"
            )
    warn_unless_elastic('DistributedOptimizer(on_failure="continue")')
    reducer = TolerantReducer(named, options, passes, known)
    wrapped = derive(optimizer, ContinuingOptimizer, _reducer=reducer)
    assert isinstance(wrapped, ContinuingOptimizer)
    _optimizers.append(weakref.ref(wrapped))
    return wrapped


class TolerantReducer(GradientReducer):
    """A reducer that notes failures.

    Attributes:
        error: the failure of this step's reduction; None: there is none.
        n_ahead: number of the next steps that make no update.
    """

    def __init__(
        self, named: Named, options: GradientOptions, passes_per_step: int, known: Named = ()
    ) -> None:
        self.error: PeerFailedError | None = None
        self.n_ahead = 0
        self._has_begun = False
        super().__init__(named, options, passes_per_step, known)

    @property
    def is_idle(self) -> bool:
        """True if this step is not reduced."""
        return self.error is not None or self.n_ahead > 0

    @property
    def version(self) -> int:
        """Number of the steps that need no update any more."""
        return self.step + self.n_ahead

    @property
    def has_begun_next(self) -> bool:
        return self._has_begun and not self.n_ahead

    def begin_pass(self) -> None:
        self._has_begun = True
        if self.is_idle:
            self._n_passes += 1
            self._is_communicating = False
            return
        with self._noting():
            super().begin_pass()

    def end_pass(self) -> CollectiveTask[None]:
        yield from super().end_pass()
        if self.is_idle:
            self.clear_gradients()

    def flush(self) -> None:
        self._has_begun = True
        if not self.is_idle:
            with self._noting():
                super().flush()
        if self.is_idle:
            self.clear_gradients()

    def restart(self) -> None:
        with self._noting():
            super().restart()

    def complete_step(self) -> None:
        """Begin the next step; if this one made no update, its gradients are gone."""
        self._has_begun = False
        if not self.n_ahead:
            with self._noting():
                super().complete_step()
            if self.error is not None:
                self._begin_step(is_zeroed=False)
            return
        self.n_ahead -= 1
        self.step += 1
        self.samples = None
        self.clear_gradients()
        self._begin_step(is_zeroed=True)

    def await_streams(self) -> None:
        if not self.is_idle:
            with self._noting():
                await_streams()

    def go_on_without_updates(self, n_ahead: int) -> None:
        """Go on in a new view; the next n_ahead steps make no update."""
        self.error, self.n_ahead = None, n_ahead
        self.clear_gradients()
        self._begin_step(is_zeroed=True)

    def clear_gradients(self) -> None:
        """Set gradients to zero, in new memory: messages may still be written to the buckets."""
        for slot in self.slots:
            if slot.parameter.grad is not None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)

    def _load(self, slot: GradientSlot) -> None:
        with self._noting():
            super()._load(slot)

    def _finish(self) -> CollectiveTask[None]:
        try:
            yield from super()._finish()
        except PeerFailedError as error:
            self._note(error)

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except PeerFailedError as error:
            self._note(error)

    def _note(self, error: PeerFailedError) -> None:
        """Keep a failure until step(), or raise it if the ranks cannot go on after it."""
        if is_running() or end_of_view(error) is None:
            raise error
        self.error = self.error or error
        self._is_communicating = self._is_spoiled = False
        self.plan.drop()


class ContinuingOptimizer(AveragingOptimizer):
    """First base class of the wrapped optimizer; the second is the optimizer's own class."""

    _reducer: TolerantReducer

    def settle(self) -> None:
        """Agree with the ranks of a new view on the version of the weights. Collective."""
        reducer = self._reducer
        mine = np.array([[reducer.version, reducer.has_begun_next]], np.int64)
        of_ranks = collectives.allgather(mine, name="versions of weights").tolist()
        newest = max(version for version, _ in of_ranks)
        root = next(r for r, (version, _) in enumerate(of_ranks) if version == newest)
        if any(version < newest for version, _ in of_ranks):
            self._take_weights(root, is_behind=reducer.version < newest)
        is_lost = any(version == newest and has_begun for version, has_begun in of_ranks)
        reducer.go_on_without_updates(newest + is_lost - reducer.step)

    @torch.no_grad()
    def _take_weights(self, root: int, *, is_behind: bool) -> None:
        """Set the weights, and what the optimizer keeps of each, to those of the root."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        mine = [(p.detach(), self.state.get(p)) for p in parameters]
        theirs = broadcast_tree(mine, root, name="weights after a loss")
        if not is_behind:
            return
        for p, (weight, state) in zip(parameters, theirs, strict=True):
            p.copy_(weight)
            self.state.pop(p, None)
            if state is not None:
                self.state[p] = state

    def _update(self, *closure: Any) -> Any:
        """Make the update, unless this step is lost, or its result has come from another rank."""
        if closure:
            raise ValueError(
                'DistributedOptimizer: on_failure="continue" does not go with step(closure), whose '
                "update cannot be left out: call backward() and step(), or use elastic.run"
            )
        self._reducer.await_streams()
        if self._reducer.error is not None:
            _go_on_after(self._reducer.error)
        return None if self._reducer.n_ahead else super()._update()

    def __reduce_ex__(self, protocol: Any) -> Any:
        reducer = self._reducer
        plain = underlying(self, OUR_ATTRIBUTES)
        names = [slot.name for slot in reducer.slots]
        return _rewrap, (plain, names, reducer.options, reducer.passes_per_step)


def _rewrap(
    optimizer: Optimizer, names: Sequence[str], options: GradientOptions, passes: int
) -> Optimizer:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return with_continuation(optimizer, list(zip(names, parameters, strict=True)), options, passes)


def _go_on_after(error: PeerFailedError) -> None:
    """Form the next view; all optimizers agree on their weights there. Collective."""
    while True:
        end = end_of_view(error)
        if end is None or not heal(end):
            raise error
        try:
            begin_in_new_view()
            for each in tuple(_optimizers):
                optimizer = each()
                if optimizer is None:
                    _optimizers.remove(each)
                else:
                    optimizer.settle()
        except PeerFailedError as another:
            error = another
        else:
            break
    if rank() == 0:
        _log.warning(
            "DistributedOptimizer: a rank is lost (%s), and with it one step of the others; "
            "%d ranks go on in view %d",
            error,
            size(),
            view().number,
        )
