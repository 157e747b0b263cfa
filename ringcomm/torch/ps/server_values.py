"""Values and state of an optimizer that the servers keep: set to the chief's, or fetched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ringcomm.engine.api import collectives
from ringcomm.ps.job import is_chief
from ringcomm.ps.states import pull_state as pull_table_state
from ringcomm.ps.states import push_state as push_table_state
from ringcomm.torch.ps import states
from ringcomm.torch.ps.buckets import Bucket
from ringcomm.torch.ps.feeder import Feeder


def push_values(feeder: Feeder) -> None:
    """Give all the chief's values. Collective, between two steps."""
    _from_chief(feeder, lambda bucket: bucket.table.push(bucket.values(), assign=True).wait())


def pull_values(feeder: Feeder) -> None:
    """Fetch the servers' values, between two steps."""
    feeder.begin_step()
    feeder.pusher.fetch_values(feeder.pusher.buckets)


def push_state(feeder: Feeder, state: Mapping[Any, Any]) -> None:
    """Give all the chief's values, and the servers the chief's state. Collective."""
    _from_chief(feeder, lambda each: push_table_state(each.table, states.from_torch(each, state)))


def gather_state(feeder: Feeder) -> dict[Any, Any]:
    """Return the state that the servers keep, by parameter, as torch would have it."""
    found: dict[Any, Any] = {}
    for bucket in feeder.pusher.buckets:
        if not bucket.is_frozen:
            states.to_torch(bucket, pull_table_state(bucket.table), found)
    return found


def _from_chief(feeder: Feeder, push: Callable[[Bucket], object]) -> None:
    pusher = feeder.pusher
    pusher.forget_updaters()
    for bucket in pusher.buckets:
        bucket.table.updater = pusher.updater_for(bucket)
        bucket.table.forget_residual()
        if is_chief():
            push(bucket)
    collectives.barrier(name=f"values (ps optimizer {feeder.number})", group=feeder.session.group)
    pull_values(feeder)
