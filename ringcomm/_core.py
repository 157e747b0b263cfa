"""Raises an ImportError with advice if the compiled module is missing.

If both modules are there, Python imports the compiled one.
"""

import shlex
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1]
if (_FOLDER / "pyproject.toml").exists():
    _problem = (
        f"{_FOLDER} is ringcomm's source folder, which has no compiled part: take it out of "
        "PYTHONPATH, and start python elsewhere or with -P; or type: "
        f"pip install -e {shlex.quote(str(_FOLDER))}"
    )
else:
    _problem = (
        f"the ringcomm in {_FOLDER} has no compiled part for this Python: reinstall it, as "
        "`ringcomm check` says"
    )
raise ImportError(_problem, name=__name__, path=__file__)
