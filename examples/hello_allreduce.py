"""Add up an array over all ranks: mpirun -np 4 python examples/hello_allreduce.py"""

import numpy as np

import ringcomm as rc

rc.init()
mine = np.full(5, rc.rank() + 1, dtype=np.float32)
total = rc.allreduce(mine)
print(f"rank {rc.rank()} of {rc.size()}: {mine[0]:.0f} -> {total[0]:.0f}")
assert (total == rc.size() * (rc.size() + 1) / 2).all()
