"""Files and functions that CONTRIBUTING.md and docs/internals name exist; so do linked pages."""

import ast
import itertools
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from harness import run_ranks
from loopback import LoopbackHub

import ringcomm as rc
from ringcomm.collectives.select_algorithm import choose

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs/internals").glob("*.md"))]
FILE = re.compile(r"`(\w+/[\w/]+\.\w+)(?:::([\w.]+))?`")  # from the root, or from ringcomm/


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_what_a_page_names_is_there(page):
    for path, name in FILE.findall(page.read_text()):
        places = (ROOT / path, ROOT / "ringcomm" / path)
        assert any(is_there(place, name) for place in places), f"{path}::{name}"


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
)
def test_what_a_page_links_to_is_there(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text())
    assert [
        link
        for link in links
        if not has_heading((page.parent / link[0]) if link[0] else page, link[1])
    ] == []


def test_the_table_of_modules_has_those_of_the_parameter_server():
    page = (ROOT / "docs/internals/parameter_server.md").read_text().partition("\n## Modules\n")[2]
    rows = re.findall(r"^\| `(?:ringcomm/ps/)?([\w/]*)` \| (.*) \|$", page, re.MULTILINE)
    named = {f"{folder}{name}.py" for folder, text in rows for name in re.findall(r"`(\w+)`", text)}
    top = ROOT / "ringcomm/ps"
    there = {path.relative_to(top).as_posix() for path in top.rglob("[a-z]*.py")}
    assert named == there


def test_each_name_of_a_benchmark_is_that_of_a_module():
    folder = ROOT / "ci/bench"
    known = set(re.findall(r'^    "(\w+)": ', (folder / "__main__.py").read_text(), re.MULTILINE))
    assert known
    assert known <= {each.stem for each in folder.glob("*.py")}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    named = {
        name
        for page in pages
        for name in re.findall(r"(?:python |`)ci/bench (\w+)", page.read_text())
    }
    assert named <= known | {"WHAT"}


def test_the_architecture_fits_a_page():
    architecture, _, rest = PAGES[0].read_text().partition("## Glossary\n")
    terms = re.findall(r"^\| ", rest.partition("\n## ")[0], re.MULTILINE)
    assert len(architecture.splitlines()) <= 80
    assert len(terms) - 1 <= 30


def is_there(path, name):
    """Return True if the file is there and defines the name, which may be Class.method."""
    if not path.is_file() or not name:
        return path.is_file()
    text = path.read_text()
    if path.suffix != ".py":
        return (
            re.search(rf"\b(class|struct)( alignas\(\d+\))? {name}\b|\b{name}\(", text) is not None
        )
    nodes = ast.parse(text).body
    for part in name.split("."):
        found = [node for node in nodes if getattr(node, "name", None) == part]
        nodes = getattr(found[0], "body", []) if found else None
        if nodes is None:
            return False
    return True


def has_heading(path, anchor):
    if not path.exists() or not anchor:
        return path.exists()
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.long
def test_an_allreduce_walks_as_the_page_says():
    walk = (ROOT / "docs/internals/allreduce.md").read_text().partition("\n## The walk")[2]
    named = FILE.findall(walk.partition("\n## ")[0])
    steps = [(path, name) for path, name in named if name and path.endswith(".py")]
    choose.cache_clear()

    calls = []  # of all ranks: what one has chosen or recorded, the others find in a cache

    def body(rank):
        x = (np.arange(1 << 20) % 8191 * (rank + 1)).astype(np.float32)
        sys.setprofile(lambda frame, event, _: calls.append(frame.f_code))
        y = rc.allreduce(x)
        sys.setprofile(None)
        assert y[4099] == 4099 * 6

    run_ranks(3, body, hub=LoopbackHub(3, (0, 1, 2)))
    assert left_out(steps, calls) == []


def left_out(steps, calls):
    """Return the steps that are not among the calls, each after the one before it."""
    places = ((Path(code.co_filename).as_posix(), code.co_qualname) for code in calls)
    found = itertools.takewhile(
        lambda step: any(file.endswith(step[0]) and name == step[1] for file, name in places), steps
    )
    return steps[len(list(found)) :]
