"""`python -m ringcomm.ps.server`: ranks that are servers, as a second command of mpirun.

mpirun -np 4 python train.py : -np 2 python -m ringcomm.ps.server [MODULE ...]

The modules are imported before: they have what is marked @ps.function.
"""

import importlib
import sys

from ringcomm.ps.job import init

if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    init(role="server")
