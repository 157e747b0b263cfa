"""Runs a command while a private daemon of NVIDIA's MPS lets its processes share the GPU.

usage: python -m gpu_suite.under_mps COMMAND [ARGUMENT...]
"""

from __future__ import annotations

import subprocess
import sys

from gpu_suite.driver_probes import private_mps


def main() -> int:
    with private_mps():
        return subprocess.run(sys.argv[1:], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
