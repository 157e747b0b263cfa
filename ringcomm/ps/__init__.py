"""Parameter server: some ranks own the parameters, the others push gradients and pull values."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcomm.ps import initializers, optim
    from ringcomm.ps.checkpoint.client import load, restore, save
    from ringcomm.ps.checkpoint.reader import export_safetensors, load_state_dict
    from ringcomm.ps.checkpoint.recover import Recovered, recover
    from ringcomm.ps.client.dense.function_calls import function
    from ringcomm.ps.client.dense.table import Table, table
    from ringcomm.ps.client.future import Future, Pushed
    from ringcomm.ps.client.rows.hash_table import HashTable, hashtable
    from ringcomm.ps.client.rows.maintenance import Metadata
    from ringcomm.ps.client.rows.prefetching_loader import prefetching
    from ringcomm.ps.client.rows.pull_many import pull_many
    from ringcomm.ps.evaluation import Report, evaluator, report, reports, snapshot
    from ringcomm.ps.job import (
        complete_step,
        init,
        rank,
        should_stop,
        size,
        step_number,
        stop,
        workers,
    )
    from ringcomm.ps.members.live_workers import live_workers
    from ringcomm.ps.placement.rebalance import Rebalanced, rebalance
    from ringcomm.ps.placement.scaling import add_servers, remove_server
    from ringcomm.ps.row_policies import Admit, Evict
    from ringcomm.ps.session import is_chief
    from ringcomm.ps.statistics import stats
    from ringcomm.ps.update_modes import SSP, FirstOf

__all__ = [
    "SSP", "Admit", "Evict", "FirstOf", "Future", "HashTable", "Metadata", "Pushed",
    "Rebalanced", "Recovered", "Report", "Table", "add_servers", "complete_step", "evaluator",
    "export_safetensors", "function", "hashtable", "init", "initializers", "is_chief",
    "live_workers", "load", "load_state_dict", "optim", "prefetching", "pull_many", "rank",
    "rebalance", "recover", "remove_server", "report", "reports", "restore", "save",
    "should_stop", "size", "snapshot", "stats", "step_number", "stop", "table", "workers",
]  # fmt: skip

# As in ringcomm/__init__.py. A rank of a job needs the first ones.
_HOMES = (
    "job",
    "session",
    "update_modes",
    "client.future",
    "checkpoint.client",
    "client.dense.table",
    "client.rows.hash_table",
    "row_policies",
    "client.rows.maintenance",
    "client.rows.pull_many",
    "client.rows.prefetching_loader",
    "client.dense.function_calls",
    "evaluation",
    "members.live_workers",
    "statistics",
    "checkpoint.recover",
    "placement.rebalance",
    "placement.scaling",
    "checkpoint.reader",
)


def __getattr__(name: str) -> Any:
    from ringcomm.late_names import find

    homes = () if name in ("initializers", "optim") else _HOMES
    value = globals()[name] = find(__name__, name, __all__, homes)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
