"""The torch.distributed backend "ringcomm".

import ringcomm.torch                              # registers it
torch.distributed.init_process_group("ringcomm")   # under mpirun
"""

from ringcomm.torch.distributed.entry import init_process_group, register
from ringcomm.torch.distributed.group.process_group import ProcessGroup

__all__ = ["ProcessGroup", "init_process_group", "register"]
