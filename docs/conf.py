"""The site of these pages, for Sphinx: ci/site builds it. The pages know nothing of it.

The source folder is that of the repository, so that all links between pages hold, also to README
and to examples, which are pages, too. What stands where is said here: ORDER.
"""

import ast
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# By heading, the pages in the order in which one reads them. README.md is the first page.
ORDER = {
    "The first hour": [
        *("first_job", "watch", "elastic", "servers_in_one_page", "coming_from", "errors"),
    ],
    "Jobs": ["run", "running", "control", "cluster"],
    "Training with torch": ["torch", "data", "sharded_optimizer", "torch_distributed", "horovod"],
    "Arrays": ["collectives", "from_mpi4py", "gpu"],
    "Parameter servers": ["parameter_server", "promises", "compression"],
    "API": ["api/ringcomm", "api/torch", "api/ps", "api/data", "api/elastic", "api/codec"],
    "Figures": ["benchmarks"],
    "The project": [
        *("/CHANGELOG", "/SECURITY", "/CONTRIBUTING", "internals/README", "/examples/README"),
    ],
}  # fmt: skip
# Below these pages, by their own lists.
BELOW = {
    "docs/internals/README": [
        *("allreduce", "operations", "shared_memory", "failures", "elastic", "gpu", "torch"),
        *("parameter_server", "several_hosts"),
    ],
    "examples/README": [
        *("hello_allreduce", "digits_cnn", "elastic", "work_queue", "heat_equation", "ddp_backend"),
        *("zero1", "fsdp_transformer", "pipeline_tp", "gpu_train", "multi_task", "ps_digits"),
        *("ps_roles", "ps_recommender", "ps_sparse_linear", "ps_graph", "ps_text", "ps_online"),
        "ps_failover",
    ],
}

project = "ringcomm"
author = "The ringcomm developers"
version = release = re.findall(r'"(\d.*)"', (ROOT / "ringcomm/_version.py").read_text())[0]

root_doc = "README"
include_patterns = [
    *("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md"),
    *("docs/*.md", "docs/api/*.rst", "docs/internals/*.md", "examples/*.md", "examples/*.py"),
]
exclude_patterns = [".*", "build", "dist", "csrc", "ringcomm", "tests", "runs", "**/__pycache__"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".py": "example"}
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 4  # as forges make them
myst_enable_extensions: list[str] = []
suppress_warnings = ["myst.header"]

autodoc_mock_imports = ["mpi4py", "cupy", "torch", "ringcomm._core"]
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # properties are listed by themselves

html_theme = "furo"
html_title = "ringcomm"
html_static_path = ["_static"]
html_css_files = ["ringcomm.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6a83", "color-brand-content": "#0b6a83"},
    "dark_css_variables": {"color-brand-primary": "#5cc3dd", "color-brand-content": "#5cc3dd"},
}

# Values that imports of ringcomm ask for, of what is not installed here.
ASKED_FOR = {
    "torch": {"__version__": "2.13"},
    "torch.distributed": {"is_available": lambda: True},
    "torch.distributed.rendezvous": {"_rendezvous_handlers": {"env": None}},
}


def toctrees() -> str:
    """Return, for README.md, what puts all pages at the left."""
    parts = []
    for caption, pages in ORDER.items():
        names = "\n".join(page if page.startswith("/") else f"docs/{page}" for page in pages)
        parts.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{names}\n```\n")
    return "".join(parts)


def read(app, docname, content) -> None:
    """Change what a page has for a forge, before it is parsed."""
    text = content[0]
    if docname == "README":
        text += toctrees()
    if docname in BELOW:
        text += "\n```{toctree}\n:hidden:\n\n" + "\n".join(BELOW[docname]) + "\n```\n"
    text = re.sub(r"\[([^\]]*)\]\((?:\.\./)*ci/\w+\)", r"\1", text)  # a folder is no page
    text = re.sub(r"\[[\w./]+\.md\](?=\()", "[]", text)  # the title of a page, not its file
    content[0] = re.sub(r"```mermaid\n(.*?)```", in_words, text, flags=re.DOTALL)


def in_words(match: re.Match[str]) -> str:
    """Return lines `one -> other` for a diagram; the script that draws it on forges is not here."""
    names = dict(re.findall(r"(\w+)\[\"(.*?)\"\]", match[1]))
    names |= dict(re.findall(r"participant (\w+) as (.*)", match[1]))
    lines: dict[str, list[str]] = {}
    for line in match[1].splitlines():
        plain = re.sub(r"\[\".*?\"\]", "", line).strip()
        if found := re.match(r"(\w+)-?->>(\w+): (.*)", plain):
            one, other, what = found.groups()
            lines[f"{len(lines)}"] = [names[one], f"{names[other]}: {what}"]
        elif found := re.match(r"(\w+) -[-.](?: \"(.*)\" [-.]-)?> (\w+)", plain):
            one, what, other = found.groups()
            text = names[other].partition(" (")[0] + (f" ({what})" if what else "")
            lines.setdefault(one, [names[one]]).append(text)
    width = max(len(first) for first, *_ in lines.values())
    told = (f"{first:{width}} -> {', '.join(others)}\n" for first, *others in lines.values())
    return f"```text\n{''.join(told)}```"


def language_of(code: str) -> str:
    """Return the language of an indented block, which names none."""
    lines = [line for line in code.splitlines() if line.strip()] or [""]
    if any(line.startswith("$ ") for line in lines):
        return "console"
    try:
        tree = ast.parse(code)
    except SyntaxError:
        pass
    else:
        if any(
            not isinstance(each, ast.Expr) or isinstance(each.value, ast.Call) for each in tree.body
        ):
            return "python"
    if re.match(COMMANDS, lines[0]):
        return "bash"
    return "text"


COMMANDS = re.compile(
    r"(\w+=\S* )*(\.?/?ci/|\.venv/|#!|"
    r"(ringcomm|pip|python|mpirun|srun|sbatch|bash|export|apt|apt-get) )"
)


def as_rst(app, what, name, thing, options, lines) -> None:
    """Change a docstring, which is plain text with `code`, into what Sphinx reads."""
    made: list[str] = []
    is_code = False
    for line in indented_code(lines):
        is_indented = line.startswith("    ")
        if is_code := is_indented and (is_code or is_start_of_code(line, made)):
            made += ["::", ""] * (not made or not made[-1].startswith("    "))
            made.append(line)
            continue
        if line and not is_indented and made and made[-1].startswith("    "):
            made.append("")  # what was indented ends without an empty line
        parts = line.replace("Errors of all functions:", "Raises:").split("`")
        for i in range(0, len(parts), 2):
            parts[i] = re.sub(r"(?<=\w)_(?!\w)|(?<!^)\*(?!\w+:)|\|", r"\\\g<0>", parts[i])
        made.append("``".join(parts) if len(parts) % 2 else line)
    lines[:] = made


def indented_code(lines: list[str]) -> list[str]:
    """Return a docstring in which all code is indented: of some it is all below the first line."""
    paragraphs = "\n".join(lines).split("\n\n")
    made = [
        textwrap.indent(each, "    ") if i and language_of(each) == "python" else each
        for i, each in enumerate(paragraphs)
    ]
    return "\n\n".join(made).split("\n")


def is_start_of_code(line: str, before: list[str]) -> bool:
    """Return True for an indented line after an empty one that no section ("Args:") is before."""
    if not before or before[-1]:
        return False
    text = [each for each in before if each]
    return bool(text) and not text[-1].startswith("    ") and not re.fullmatch(SECTION, text[-1])


SECTION = re.compile(r"(Args|Returns|Raises|Yields|Attributes|Example|Cost):")


def setup(app):
    from docutils import nodes
    from sphinx.ext.autodoc.mock import MockFinder, MockLoader
    from sphinx.parsers import Parser
    from sphinx.transforms import SphinxTransform
    from sphinx.transforms.post_transforms import SphinxPostTransform

    sys.path.insert(0, str(ROOT))  # not where a test reads this file

    class Example(Parser):
        """A script as a page: its name, and its text."""

        supported = ("example",)

        def parse(self, inputstring, document):
            name = Path(document["source"]).name
            section = nodes.section(ids=[nodes.make_id(name)], names=[name])
            code = nodes.literal_block(inputstring, inputstring, language="python")
            section += [nodes.title(name, name), code]
            document += section

    class Languages(SphinxTransform):
        """Gives a language to code that has none."""

        default_priority = 450

        def apply(self):
            for block in self.document.findall(nodes.literal_block):
                if block.get("language") in (None, "none", "default"):
                    block["language"] = language_of(block.astext())

    class Breaks(SphinxPostTransform):
        """Lets long names in tables break where their words end."""

        default_priority = 900
        formats = ("html",)

        def run(self):
            for entry in self.document.findall(nodes.entry):
                for name in [*entry.findall(nodes.literal)]:
                    words = re.findall(r"[^_/:.]*[_/:.]*", name.astext())
                    if len(name.astext()) > 24 and name.next_node() is name.next_node(nodes.Text):
                        name.clear()
                        for word in words:
                            name += [nodes.Text(word), nodes.raw("", "<wbr>", format="html")]

    class Loader(MockLoader):
        """Loads what is not installed here, with the values that an import asks for."""

        def exec_module(self, module):
            vars(module).update(ASKED_FOR.get(module.__name__, {}))

    MockFinder.__init__.__globals__["MockLoader"] = Loader
    app.add_source_parser(Example)
    app.add_transform(Languages)
    app.add_post_transform(Breaks)
    app.connect("source-read", read)
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
    return {"parallel_read_safe": True, "parallel_write_safe": True}
