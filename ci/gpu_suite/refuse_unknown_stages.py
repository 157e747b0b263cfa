"""Refuses names that fit no stage, and lists the stages.

usage: python -m gpu_suite.refuse_unknown_stages NAME,NAME
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gpu_suite.__main__ import names_of, plan


def main() -> int:
    known = [stage.name for wave in plan() for stage in wave]
    problem = refusal(names_of(sys.argv[1]), known)
    if problem:
        print(f"gpu_suite: {problem}", file=sys.stderr)
    return 2 if problem else 0


def refusal(names: Sequence[str], known: Sequence[str]) -> str:
    """Return what is wrong with these beginnings of names; "": nothing."""
    unknown = [name for name in names if not any(each.startswith(name) for each in known)]
    if names and not unknown:
        return ""
    wrong = f"no stage is called {' or '.join(map(repr, unknown))}" if names else "no names"
    return f"--only: {wrong}. The stages are {', '.join(known)}; a beginning will do"


if __name__ == "__main__":
    sys.exit(main())
