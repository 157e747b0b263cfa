"""Each fault of ci/mutants can still be planted; whether it is caught takes ci/mutants itself."""

from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from types import CodeType

import pytest
from mutations import CATEGORIES, CPP_MUTATIONS, MUTATIONS

ROOT = Path(__file__).parents[2]
EVERY = [*MUTATIONS, *CPP_MUTATIONS]


def of_file(mutations):
    """Return the faults of each file or folder: there are hundreds, each too small for a test."""
    found = defaultdict(list)
    for mutation in mutations:
        found[mutation.file].append(mutation)
    return pytest.mark.parametrize("faults", found.values(), ids=list(found))


@of_file(MUTATIONS)
def test_each_fault_has_one_place_and_changes_the_code(faults):
    for mutation in faults:
        path, faulty = mutation.planted(ROOT)  # raises unless there is one place
        old, new = changed_parts(path.read_text(), faulty)
        assert compiled(old) != compiled(new), mutation.name


def changed_parts(old, new):
    """Return the definitions of a module in which the two differ: to parse all of it takes long."""
    parts = old.split("\n\n\n"), new.split("\n\n\n")
    if len(parts[0]) != len(parts[1]):
        return old, new
    pairs = [pair for pair in zip(*parts, strict=True) if pair[0] != pair[1]]
    return tuple("\n\n\n".join(of_one) for of_one in zip(*pairs, strict=True))


def compiled(part):
    """Return its code, which knows not in which line it is; ast.dump() takes much longer."""
    return without_lines(compile(part, "part", "exec"))


def without_lines(code):
    constants = (without_lines(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=tuple(constants))


@of_file(CPP_MUTATIONS)
def test_each_fault_in_cpp_has_one_place_and_changes_more_than_a_comment(faults):
    for mutation in faults:
        path, faulty = mutation.planted(ROOT)  # raises unless there is one place
        assert without_comments(faulty) != without_comments(path.read_text()), mutation.name


def without_comments(text):
    return [line.partition("//")[0] for line in text.splitlines()]


def test_the_stress_runs_that_are_to_catch_them_exist():
    assert [each.name for each in CPP_MUTATIONS if not (each.targets or each.stress)] == []
    programs = {name for mutation in CPP_MUTATIONS for name, *_ in mutation.stress}
    assert programs <= {path.stem for path in (ROOT / "csrc" / "stress").glob("*.cpp")}


def test_the_tests_that_are_to_catch_them_exist():
    assert [each.name for each in MUTATIONS if not each.targets] == []
    targets = {target for mutation in EVERY for target in mutation.targets}
    assert [target for target in sorted(targets) if not exists(target)] == []


def exists(target):
    file, _, test = target.partition("::")
    return f"def {test}" in text_of(file)


@cache
def text_of(file):
    return (ROOT / "tests" / file).read_text()


def test_names_are_unique_and_every_category_has_some():
    assert len({mutation.name for mutation in EVERY}) == len(EVERY)
    counts = Counter(mutation.category for mutation in EVERY)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 3
