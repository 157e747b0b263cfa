"""`python -m ringcomm.ps.server`: a command whose ranks are servers, beside others of one mpirun.

mpirun -np 4 python train.py : -np 2 python -m ringcomm.ps.server
"""

from ringcomm.ps.job import init

if __name__ == "__main__":
    init(role="server")
