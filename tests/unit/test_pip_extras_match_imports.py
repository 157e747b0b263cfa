"""The extras for people who watch jobs install exactly what the code imports."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "ringcomm"
# Folder or file within ringcomm/ -> the extras with which it works.
PLACES = {
    "launch/watch/prometheus.py": {"prometheus"},
    "launch/watch": {"cli"},
    "progress_bar.py": {"cli"},
    "launch/dashboard": {"dashboard"},
}
CORE = {"numpy", "mpi4py", "ringcomm"}
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def imported(path):
    """Return the top modules that a file imports, except those of the standard library."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module)
    return {name.partition(".")[0] for name in found} - sys.stdlib_module_names


def names_of(extra):
    """Return the modules that an extra installs, which have the names of their packages here."""
    return {re.match(r"[\w-]+", each)[0].replace("-", "_") for each in EXTRAS[extra]}


def files_of(extra):
    """Return the files that work with an extra: each file belongs to the first place it is in."""
    for path in [PACKAGE / "progress_bar.py", *PACKAGE.glob("launch/**/*.py")]:
        name = str(path.relative_to(PACKAGE))
        place = next((each for each in PLACES if name.startswith(each)), None)
        if place is not None and extra in PLACES[place]:
            yield path


@pytest.mark.parametrize("extra", ["cli", "dashboard", "prometheus"])
def test_an_extra_installs_what_its_code_imports_and_nothing_else(extra):
    assert set().union(*map(imported, files_of(extra))) - CORE == names_of(extra)


def test_the_rest_of_the_commands_needs_nothing_but_the_core():
    watched = {path for extra in EXTRAS for path in files_of(extra)}
    others = set(PACKAGE.glob("launch/**/*.py")) - watched
    found = set().union(*map(imported, others))
    assert found - CORE <= {"cloudpickle"}, "cloudpickle is the extra `notebook`, which run() tries"
