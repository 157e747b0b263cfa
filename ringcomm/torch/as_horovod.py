"""Lets scripts that import horovod.torch run on ringcomm unchanged.

    mpirun -np 4 python -m ringcomm.torch.as_horovod train.py --epochs 3

or, as the first lines of a script:

    from ringcomm.torch.as_horovod import install
    install()

From then on `import horovod.torch as hvd` gives ringcomm.torch. Nothing is written to disk, and an
installed Horovod is hidden in this process alone.
"""

from __future__ import annotations

import runpy
import sys

from ringcomm.torch.horovod.alias import install

__all__ = ["install", "main"]


def main(arguments: list[str]) -> None:
    """Run a script, or with -m a module, as Python would."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(
            "usage: python -m ringcomm.torch.as_horovod [-m] SCRIPT [ARGUMENTS ...]\n\n"
            "Runs SCRIPT with horovod.torch being ringcomm.torch; with -m it is a module's name.",
            file=sys.stdout if arguments[:1] else sys.stderr,
        )
        raise SystemExit(0 if arguments[:1] in (["-h"], ["--help"]) else 2)
    install()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = arguments[0].rpartition("/")[0] or "."
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
