"""ci/house finds what breaks a rule."""

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

loader = importlib.machinery.SourceFileLoader("house", str(Path(__file__).parents[2] / "ci/house"))
house = importlib.util.module_from_spec(importlib.util.spec_from_loader("house", loader))
sys.modules["house"] = house  # dataclasses look themselves up
loader.exec_module(house)

CONTRACTS = """
[[tool.importlinter.contracts]]
layers = ["faces | tools", "core"]

[[tool.importlinter.contracts]]
source_modules = ["ringcomm.core.order", "ringcomm.pure.*"]
forbidden_modules = ["threading", "time"]
"""
PAGE = """
    faces | tools      what people touch
                       epoch_order.py, size.py
                       transport_choice.py (pure); other.py

The `core/engine.py` is not pure.
"""
SOUND = {
    "pyproject.toml": CONTRACTS,
    "CONTRIBUTING.md": PAGE,
    "ringcomm/core/order.py": '"""Order. Pure."""\n',
    "ringcomm/pure/choice.py": "",
    "ringcomm/core/engine.py": "from ringcomm.core import order\n",
    "ringcomm/faces/__init__.py": "from ..core.engine import x\n",
}


@pytest.fixture
def tree(tmp_path, capsys):
    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)

    def check():
        code = house.main(tmp_path)
        return code, capsys.readouterr().err

    write(SOUND)
    return SimpleNamespace(write=write, check=check)


def test_no_size_is_a_fault(tree):
    methods = "".join(f"    def f{i}(self): ...\n" for i in range(100))
    tree.write({f"ringcomm/many/m{i}.py": "" for i in range(50)})
    tree.write({"ringcomm/core/big.py": f"class A:\n{methods}" + "x = 1\n" * 1000})
    assert tree.check() == (0, "")


TYPE_CHECKING = "if TYPE_CHECKING:\n    from ringcomm.core.b import B\n"
IN_FUNCTION = "def f():\n    import ringcomm.core.c\n"


@pytest.mark.parametrize(
    ("files", "error"),
    [
        (
            {
                "ringcomm/core/a.py": TYPE_CHECKING,
                "ringcomm/core/b.py": IN_FUNCTION,
                "ringcomm/core/c.py": "from . import a\nfrom ringcomm.core import b\n",
            },
            "core.a; ringcomm.core.b (ringcomm.core.b -> ringcomm.core.c -> ringcomm.core.b); "
            "ringcomm.core.c",
        ),
        (
            {
                "ringcomm/core/__init__.py": "from ringcomm.core.a import A\n",
                "ringcomm/core/a.py": "from ringcomm.core import b\n",  # runs __init__.py, too
            },
            "ringcomm.core (ringcomm.core -> ringcomm.core.a -> ringcomm.core)",
        ),
        ({"ringcomm/core/a.py": '"""Facts in, verdicts out: pure."""\n'}, "ringcomm.core.a"),
        ({"CONTRIBUTING.md": PAGE + "`engine.py` (pure)"}, "engine.py of CONTRIBUTING.md"),
        ({"pyproject.toml": CONTRACTS.replace("core.order", "core.odd")}, "ringcomm.core.odd"),
        ({"CONTRIBUTING.md": PAGE.replace("faces |", "")}, "does not name: faces"),
    ],
)
def test_what_breaks_a_rule_is_named(files, error, tree):
    tree.write(files)
    code, errors = tree.check()
    assert code == 1
    assert error in errors, errors
