"""Parameter server: some ranks own the parameters, the others push gradients and pull values."""

from ringcomm.ps import optim
from ringcomm.ps.evaluation import Report, evaluator, report, reports, snapshot
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
    "Report",
    "Table",
    "evaluator",
    "init",
    "is_chief",
    "optim",
    "rank",
    "report",
    "reports",
    "size",
    "snapshot",
    "stats",
    "table",
    "workers",
]
