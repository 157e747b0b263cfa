"""Each fault of ci/mutants can still be planted; whether it is caught takes ci/mutants itself."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from mutations import CATEGORIES, CPP_MUTATIONS, MUTATIONS

ROOT = Path(__file__).parents[2]
EVERY = [*MUTATIONS, *CPP_MUTATIONS]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_fault_has_one_place_and_changes_the_code(mutation):
    path, faulty = mutation.planted(ROOT)  # raises unless there is one place
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(path.read_text()))


@pytest.mark.parametrize("mutation", CPP_MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_fault_in_cpp_has_one_place_and_changes_more_than_a_comment(mutation):
    path, faulty = mutation.planted(ROOT)  # raises unless there is one place
    assert without_comments(faulty) != without_comments(path.read_text())


def without_comments(text):
    return [line.partition("//")[0] for line in text.splitlines()]


@pytest.mark.parametrize("mutation", CPP_MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_stress_runs_that_are_to_catch_it_exist(mutation):
    assert mutation.targets or mutation.stress
    for name, *_ in mutation.stress:
        assert (ROOT / "csrc" / "stress" / f"{name}.cpp").exists()


@pytest.mark.parametrize("mutation", EVERY, ids=lambda mutation: mutation.name)
def test_the_tests_that_are_to_catch_it_exist(mutation):
    assert mutation.targets or mutation in CPP_MUTATIONS
    for target in mutation.targets:
        file, _, test = target.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text()


def test_names_are_unique_and_every_category_has_some():
    assert len({mutation.name for mutation in EVERY}) == len(EVERY)
    counts = Counter(mutation.category for mutation in EVERY)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 3
