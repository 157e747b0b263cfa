"""Asks hosts whether they are there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from ringcomm.launch.run_child_with_deadline import run_child

_ANSWER_S = 15.0
_AT_ONCE = 32
_NO_AGENT = 127  # of run_child()


def silent_hosts(
    names: Sequence[str],
    agent: Sequence[str],
    environ: Mapping[str, str],
    *,
    own_names: Collection[str],
) -> frozenset[str]:
    """Return which hosts do not run a command within 15 s; this host does.

    If the agent, which is ssh most often, is not installed, all count as those that answer.
    """

    def answers(name: str) -> bool:
        code = run_child([*agent, name, "true"], environ, deadline_s=_ANSWER_S).code
        return code in (0, _NO_AGENT)

    others = [name for name in names if name not in own_names]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = dict(zip(others, pool.map(answers, others), strict=True))
    return frozenset(name for name, is_there in found.items() if not is_there)
