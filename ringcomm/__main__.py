"""`python -m ringcomm` is the `ringcomm` command."""

import sys

from ringcomm.launch.cli import main

sys.exit(main())
