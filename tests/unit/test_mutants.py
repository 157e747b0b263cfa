"""Each fault of ci/mutants can still be planted; whether it is caught takes ci/mutants itself."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from mutations import CATEGORIES, MUTATIONS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_fault_has_one_place_and_changes_the_code(mutation):
    text = (ROOT / "ringcomm" / mutation.file).read_text()
    faulty = mutation.apply(text)  # raises unless there is one place
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_tests_that_are_to_catch_it_exist(mutation):
    assert mutation.targets
    for target in mutation.targets:
        file, _, test = target.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text()


def test_names_are_unique_and_every_category_has_some():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    counts = Counter(mutation.category for mutation in MUTATIONS)
    assert set(counts) == set(CATEGORIES)
    assert min(counts.values()) >= 3
