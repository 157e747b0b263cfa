"""Parameter server for torch: all of ringcomm.ps, and an optimizer whose updates servers make."""

from ringcomm.ps import *  # noqa: F403 - this face is that module and more
from ringcomm.ps import __all__ as _of_ps
from ringcomm.torch.ps.optimizer import DistributedOptimizer

__all__ = ["DistributedOptimizer", *_of_ps]  # noqa: PLE0604 - names of another __all__
