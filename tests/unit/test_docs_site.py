"""The site of ci/site has each page and each public name; code has a language."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("site_conf", ROOT / "docs/conf.py")
conf = importlib.util.module_from_spec(spec)
spec.loader.exec_module(conf)


def test_each_page_is_in_the_order_of_the_site_once():
    entries = [name for names in conf.ORDER.values() for name in names]
    pages = [f"docs/{name}".removeprefix("docs//") for name in entries]
    pages += [
        f"{page.rpartition('/')[0]}/{name}" for page, names in conf.BELOW.items() for name in names
    ]
    files = [
        *(*ROOT.glob("docs/*.md"), *ROOT.glob("docs/internals/*.md"), *ROOT.glob("docs/api/*.rst")),
        *(*ROOT.glob("examples/*.md"), *ROOT.glob("examples/*.py")),
        *(ROOT / f"{name}.md" for name in ("CHANGELOG", "SECURITY", "CONTRIBUTING")),
    ]
    assert sorted(pages) == sorted(str(path.relative_to(ROOT).with_suffix("")) for path in files)


@pytest.mark.parametrize(
    ("page", "module"),
    [
        *(("ringcomm", "ringcomm"), ("codec", "ringcomm.codec"), ("data", "ringcomm.data")),
        *(("elastic", "ringcomm.elastic"), ("ps", "ringcomm.ps"), ("torch", "ringcomm.torch")),
        *(("torch", "ringcomm.torch.elastic"), ("ps", "ringcomm.torch.ps")),
    ],
)
def test_each_public_name_is_in_the_api_reference(page, module):
    text = (ROOT / f"docs/api/{page}.rst").read_text()
    section = text.partition(f".. currentmodule:: {module}\n")[2].partition("currentmodule")[0]
    shown = set(re.findall(r"^\.\. auto\w+:: (\w+)$", section, re.MULTILINE))
    named = set(re.findall(r"``(\w+)``", section))
    public = names_of(ROOT / module.replace(".", "/") / "__init__.py")
    modules = {"__version__", *(name for name in public if is_module(module, name))}
    assert public - modules <= shown | named
    assert shown <= public


def is_module(package, name):
    folder = ROOT / package.replace(".", "/")
    return (folder / name).is_dir() or (folder / f"{name}.py").exists()


def names_of(path):
    """Return what `__all__` of a file lists by itself; torch need not be there."""
    lists = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign | ast.AugAssign)
        and ast.unparse(node).startswith(("__all__ =", "__all__ +="))
    ]
    return {each.value for one in lists for each in one.elts if isinstance(each, ast.Constant)}


@pytest.mark.parametrize(
    ("code", "language"),
    [
        ("$ python train.py 3\nepoch 1: accuracy 0.987\n", "console"),
        ("import ringcomm as rc\nrc.init()\n", "python"),
        ("rc.allreduce(x)\n", "python"),
        ("RINGCOMM_ELASTIC=1 mpirun -np 4 python train.py\n", "bash"),
        ("ringcomm run -np 4 train.py   # this machine\n", "bash"),
        ("x rank 1 was killed by SIGKILL\n", "text"),
        ("word\n", "text"),
        ("", "text"),
    ],
)
def test_code_that_names_no_language_gets_one(code, language):
    assert conf.language_of(code) == language


@pytest.mark.parametrize(
    ("docstring", "expected"),
    [
        ("Calls `x_` of allreduce_.", "Calls ``x_`` of allreduce\\_."),
        ("Two **kwargs.", "Two \\*\\*kwargs."),
        (
            "Text.\n\n    import x\n    x()\n\nMore.",
            "Text.\n\n::\n\n    import x\n    x()\n\nMore.",
        ),
        ("Text.\n\nfor x in y:\n    x()", "Text.\n\n::\n\n    for x in y:\n        x()"),
        ("Text.\n\nArgs:\n    x: a number.\n\nMore.", "Text.\n\nArgs:\n    x: a number.\n\nMore."),
    ],
)
def test_docstrings_become_what_sphinx_reads(docstring, expected):
    lines = docstring.split("\n")
    conf.as_rst(None, "function", "x", None, None, lines)
    assert "\n".join(lines) == expected


def test_pages_are_changed_for_the_site_alone_and_before_they_are_parsed():
    text = (
        "See [run.md](run.md), [a](b.md) and [c](../ci/bench).\n```mermaid\nflowchart TB\n"
        '    a["api/ (x)"] --> b["core/"]\n    a -- "short" --> b\n'
        '    b -. "late" .-> c\n    c["gpu/"]\n```\n'
    )
    content = [text]
    conf.read(None, "docs/page", content)
    assert content[0] == (
        "See [](run.md), [a](b.md) and c.\n```text\n"
        "api/ (x) -> core/, core/ (short)\ncore/    -> gpu/ (late)\n```\n"
    )
