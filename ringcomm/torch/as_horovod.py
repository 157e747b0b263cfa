"""Runs scripts that import horovod.torch on ringcomm, without changes to them.

    mpirun -np 4 python -m ringcomm.torch.as_horovod train.py --epochs 3

or, as the first lines of a script:

    from ringcomm.torch.as_horovod import install
    install()

After that, `import horovod.torch as hvd` gives ringcomm.torch in this process. The files of an
installed Horovod stay as they are.
"""

from __future__ import annotations

import runpy
import sys

from ringcomm.torch.horovod.module_aliases import install

__all__ = ["install", "main"]


def main(arguments: list[str]) -> None:
    """Run a script, or a module after -m, as Python does."""
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["-m"]:
        print(
            "usage: python -m ringcomm.torch.as_horovod [-m] SCRIPT [ARGUMENTS ...]\n\n"
            "Runs a script, or with -m a module, in which horovod.torch is ringcomm.torch.",
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
