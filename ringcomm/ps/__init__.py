"""Parameter server: some ranks own the parameters, the others push gradients and pull values."""

from ringcomm.ps import optim
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.job import init, is_chief, rank, size, workers
from ringcomm.ps.rounds import SSP, FirstOf
from ringcomm.ps.statistics import stats
from ringcomm.ps.table import Table, table

__all__ = [
    "SSP",
    "FirstOf",
    "Future",
    "Pushed",
    "Table",
    "init",
    "is_chief",
    "optim",
    "rank",
    "size",
    "stats",
    "table",
    "workers",
]
