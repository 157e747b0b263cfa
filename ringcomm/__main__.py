"""Runs the `ringcomm` command as `python -m ringcomm`."""

import sys

from ringcomm.launch.cli import main

sys.exit(main())
