"""Parameter server: some ranks own the parameters, the others push gradients and pull values."""

from ringcomm.ps import initializers, optim
from ringcomm.ps.calls import function
from ringcomm.ps.checkpoint import load, restore, save
from ringcomm.ps.checkpoint_files import load_state_dict
from ringcomm.ps.deltas import Delta, RowDelta, Stamp
from ringcomm.ps.evaluation import Report, evaluator, report, reports, snapshot
from ringcomm.ps.future import Future, Pushed
from ringcomm.ps.hashtable import HashTable, hashtable
from ringcomm.ps.job import (
    complete_step,
    init,
    is_chief,
    rank,
    should_stop,
    size,
    stop,
    workers,
)
from ringcomm.ps.policies import Admit, Evict
from ringcomm.ps.rebalancing import Rebalanced, rebalance
from ringcomm.ps.rounds import SSP, FirstOf
from ringcomm.ps.row_upkeep import Metadata
from ringcomm.ps.statistics import stats
from ringcomm.ps.subscribing import News, Subscription, subscribe
from ringcomm.ps.table import Table, table

__all__ = [
    "SSP",
    "Admit",
    "Delta",
    "Evict",
    "FirstOf",
    "Future",
    "HashTable",
    "Metadata",
    "News",
    "Pushed",
    "Rebalanced",
    "Report",
    "RowDelta",
    "Stamp",
    "Subscription",
    "Table",
    "complete_step",
    "evaluator",
    "function",
    "hashtable",
    "init",
    "initializers",
    "is_chief",
    "load",
    "load_state_dict",
    "optim",
    "rank",
    "rebalance",
    "report",
    "reports",
    "restore",
    "save",
    "should_stop",
    "size",
    "snapshot",
    "stats",
    "stop",
    "subscribe",
    "table",
    "workers",
]
