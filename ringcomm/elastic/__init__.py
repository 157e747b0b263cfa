"""Elastic training: the job goes on after it has lost ranks. See docs/elastic.md.

@rc.elastic.run
def train(state): ...

train(rc.elastic.ArrayState(step=0, weights=weights))
"""

from ringcomm.elastic.run import leave, request_scale, run
from ringcomm.elastic.state import ArrayState, HostsUpdatedInterrupt, ObjectState, State
from ringcomm.elastic.views import on_new_view, view
from ringcomm.transport.membership.view import View

__all__ = [
    "ArrayState",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "View",
    "leave",
    "on_new_view",
    "request_scale",
    "run",
    "view",
]
