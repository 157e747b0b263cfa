"""Training that goes back to a checkpoint by itself when a server dies: ps.init(recover=).

| where a worker hears of it | what follows |
|---|---|
| step() | ps.recover(); step() returns, and the gradients of the step are dropped |
| backward() | nothing is pushed any more; the next step() is as above |
| forward() of an embedding | ps.recover(), and rows are fetched again; then as in backward() |

Parameters change in step() alone: autograd needs them as the forward pass had them.
So each worker drops one step, whatever it was in, and all count on from that of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ringcomm.errors import RingcommError, ServerLostError
from ringcomm.ps.checkpoint.recover import recover
from ringcomm.ps.session import Session, session

T = TypeVar("T")


def fetched(fetch: Callable[[], T]) -> T:
    """Return what a forward pass fetches from the servers, after a recovery if need be."""
    while True:
        try:
            return fetch()
        except ServerLostError:
            current = session()
            if current.recovers_from is None or not current.recovering:
                raise
            current.drops_step = True
            recover(current.recovers_from)


def pushes_nothing(current: Session) -> bool:
    if current.recovers_from is None:
        return False
    return current.drops_step or current.client.loss is not None


def push_unless_lost(current: Session, push: Callable[[], object]) -> None:
    """Push gradients, unless they are going to be dropped."""
    if pushes_nothing(current):
        return
    try:
        push()
    except ServerLostError:  # step() recovers
        if current.recovers_from is None:
            raise


def recovered_from(current: Session, step: Callable[[], None]) -> bool:
    """Carry out the end of a step; return False if the job went back to a checkpoint instead."""
    if current.recovers_from is None:
        step()
        return True
    if not pushes_nothing(current):
        try:
            step()
        except ServerLostError:
            pass
        else:
            return True
    was_early, current.drops_step = current.drops_step, False
    if current.client.loss is not None:
        recover(current.recovers_from)
    elif was_early:
        for each in [*current.recovering]:
            each.on_recovered()
    return False


def require_alone(current: Session, *, is_on_servers: bool) -> None:
    """Raise RingcommError for an optimizer that cannot recover by itself."""
    if current.recovers_from is None:
        return
    why = ""
    if not is_on_servers:
        why = "the workers make the updates, and checkpoints of the servers have no parameters"
    elif current.recovering:
        why = "there is a second optimizer, and workers could be between the steps of the two"
    if why:
        raise RingcommError(
            f"ps.DistributedOptimizer: ps.init(recover=) was passed, and {why}. Leave it out, and "
            "call ps.recover() where the training loop catches ServerLostError"
        )
