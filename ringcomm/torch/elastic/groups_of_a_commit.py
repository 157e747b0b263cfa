"""Groups of parameters that a program has added to an optimizer since a commit."""

from __future__ import annotations

from torch.optim import Optimizer

from ringcomm.errors import RingcommError
from ringcomm.torch.optim.averaging_optimizer import AveragingOptimizer


def go_back_to_groups(optimizer: Optimizer, name: str, n_groups: int) -> None:
    """Take away the groups that were added after a commit of `n_groups`, and their gradients.

    Args:
        optimizer: the optimizer. It gets the settings and the state of its groups afterwards.
        name: name of the optimizer in the state, for errors.
        n_groups: number of groups in the commit, from the first on.

    Raises:
        RingcommError: the optimizer has fewer groups.
    """
    n_here = len(optimizer.param_groups)
    if n_here < n_groups:
        raise RingcommError(
            f"elastic: the commit has {n_groups} groups of parameters of {name}, and here it has "
            f"{n_here}, because add_param_group() was called in the training, before this process "
            "joined it. Make all groups at first, for instance of frozen parameters"
        )
    if n_here == n_groups:
        return
    optimizer.zero_grad()
    if isinstance(optimizer, AveragingOptimizer):
        optimizer.remove_param_groups(n_groups)
    else:
        del optimizer.param_groups[n_groups:]
