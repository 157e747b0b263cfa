"""ci/release refuses what is no release, and changes the version, the changelog and no more."""

import hashlib
import importlib.machinery
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "ci/release"))
release = importlib.util.module_from_spec(importlib.util.spec_from_loader("release", loader))
sys.modules["release"] = release
loader.exec_module(release)

CHANGELOG = """# Changelog

## Unreleased

### New

- A thing.

## 0.1.0 (2026-01-02)

- The first.
"""
BUILDS = """#!/bin/sh
mkdir "$3" && echo "$(git -C "$(dirname "$0")" rev-list --count HEAD)" >"$3/order"
version=$(sed -n 's/__version__ = "\\(.*\\)"/\\1/p' "$(dirname "$0")/../ringcomm/_version.py")
mv "$3/order" "$3/ringcomm-$version-py3-none-any.whl"
echo archive >"$3/ringcomm-$version.tar.gz"
"""


def test_versions_come_in_order():
    versions = ["0.1.0", "0.2.0rc1", "0.2.0rc2", "0.2.0rc10", "0.2.0", "0.9.0", "0.10.0", "1.0.0"]
    assert sorted(set(versions), key=release.order) == versions
    release.require_newer("0.10.0", ["0.9.0", "0.10.0rc3"])


@pytest.mark.parametrize("version", ["0.2.0", "0.1.9", "0.2.0rc1", "0.2", "v0.3.0", "0.3.0.dev1"])
def test_a_version_that_is_not_newer_or_is_none_is_refused(version):
    with pytest.raises(release.Refused, match=f"^{version} is no"):
        release.require_newer(version, ["0.1.0", "0.2.0"])


def test_entries_that_are_unreleased_become_those_of_the_version():
    text = release.released(CHANGELOG, "0.2.0", "2026-11-30")
    assert text == CHANGELOG.replace("## Unreleased\n", "## Unreleased\n\n## 0.2.0 (2026-11-30)\n")
    assert release.released_versions(text) == ["0.2.0", "0.1.0"]
    with pytest.raises(release.Refused, match="has nothing under"):
        release.released(text, "0.3.0", "2026-12-01")


@pytest.mark.parametrize(
    "text", [CHANGELOG.replace("## Unrel", "## unrel"), CHANGELOG + "\n## Unreleased\n\n- More.\n"]
)
def test_a_changelog_without_the_heading_or_with_two_is_refused(text):
    with pytest.raises(release.Refused, match="once"):
        release.released(text, "0.2.0", "2026-11-30")


@pytest.mark.parametrize(
    "text",
    [
        'version = "0.1.0"', "__version__='0.1.0'", "version: 0.1.0",
        "pip install ringcomm==0.1.0", "dist/ringcomm-0.1.0-cp312-abi3.whl", "ringcomm 0.1.0",
    ],
)  # fmt: skip
def test_a_version_in_a_second_place_is_refused(text):
    with pytest.raises(release.Refused, match=r"stands in a\.md, too"):
        release.require_one_place(
            "0.1.0", {"a.md": text, "b.md": "of format 0.1.0, xringcomm-0.1.0"}
        )


def test_this_tree_has_its_version_in_one_place_and_something_to_release():
    version = release.version_of(ROOT)
    release.require_one_place(version, release.texts_of(ROOT))
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"\n{release.UNRELEASED}\n" in text
    assert all(
        release.order(each) <= release.order(version) for each in release.released_versions(text)
    )


def test_the_list_of_components_has_names_versions_and_licences():
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = [("nanobind", "3.1.0", "BSD-3-Clause"), ("robin-map", "1.4.0", "MIT")]
    made = json.loads(json.dumps(release.sbom(facts, "0.2.0", "2026-11-30", parts)))
    assert (made["bomFormat"], made["specVersion"]) == ("CycloneDX", "1.6")
    whole = made["metadata"]["component"]
    assert (whole["name"], whole["version"]) == ("ringcomm", "0.2.0")
    assert whole["licenses"] == [{"expression": "Apache-2.0"}]
    told = {each["name"]: each for each in made["components"]}
    assert told.keys() == {"nanobind", "robin-map", "numpy", "mpi4py"}
    assert told["robin-map"]["version"] == "1.4.0"
    assert told["nanobind"]["licenses"] == [{"expression": "BSD-3-Clause"}]
    assert "version" not in told["numpy"]  # pip chooses it
    first, *others = made["dependencies"]
    assert first["ref"] == whole["bom-ref"]
    references = [each["bom-ref"] for each in made["components"]]
    assert first["dependsOn"] == references == [each["ref"] for each in others]


def test_each_licence_that_a_wheel_holds_is_of_a_component():
    source = (ROOT / "ci/release").read_text()
    names = {path.stem for path in [*ROOT.glob("licenses/*"), *ROOT.rglob("static/*.LICENSE")]}
    assert names == {"nanobind", "robin-map", "uPlot", "zig"}
    assert names <= set(re.findall(r'^ {8}\("([\w-]+)", ', source, re.MULTILINE))


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository with what a release looks at, and a ci/wheels that takes no time."""
    root = tmp_path / "tree"
    files = {
        "CHANGELOG.md": CHANGELOG,
        "ringcomm/_version.py": '__version__ = "0.1.0"\n',
        "pyproject.toml": (ROOT / "pyproject.toml").read_text(),
        "ci/wheels": BUILDS,
        ".gitignore": "/dist/\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "ci/wheels").chmod(0o755)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@b")
    commit(root)
    monkeypatch.setattr(release, "ROOT", root)
    monkeypatch.setattr(release, "bundled", lambda *_: [("nanobind", "3.1.0", "BSD-3-Clause")])
    monkeypatch.setenv("WHEELS_WORK", str(tmp_path / "work"))
    return root


def commit(root):
    if not (root / ".git").exists():
        release.git(root, "init", "--quiet")
    release.git(root, "add", ".")
    release.git(root, "commit", "--quiet", "--no-gpg-sign", "-m", "a")


def contents(root):
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def test_a_dry_run_leaves_the_tree_as_it_was(tree, capfd):
    before = contents(tree)
    assert release.main(["0.2.0", "--dry-run"]) == 0
    assert contents(tree) == before
    told = capfd.readouterr().out
    assert "ringcomm-0.2.0-py3-none-any.whl\n" in told
    assert "    ci/release 0.2.0\n    git commit -am" in told


def test_a_release_changes_two_files_and_makes_all_that_is_uploaded(tree, capfd):
    assert release.main(["0.2.0"]) == 0
    changed = release.git(tree, "status", "--porcelain").splitlines()
    assert changed == [" M CHANGELOG.md", " M ringcomm/_version.py"]
    assert release.version_of(tree) == "0.2.0"
    dist = tree / "dist"
    names = {"ringcomm-0.2.0-py3-none-any.whl", "ringcomm-0.2.0.tar.gz", "ringcomm-0.2.0.cdx.json"}
    assert {path.name for path in dist.iterdir()} == {*names, "SHA256SUMS"}
    digest = hashlib.sha256((dist / "ringcomm-0.2.0.tar.gz").read_bytes()).hexdigest()
    assert f"{digest}  ringcomm-0.2.0.tar.gz\n" in (dist / "SHA256SUMS").read_text()
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=dist, check=True)
    assert "    git tag -s v0.2.0" in capfd.readouterr().out
    assert release.git(tree, "tag") == ""
    assert release.main(["0.3.0"]) == 1  # what it changed is not committed
    commit(tree)
    sums = (dist / "SHA256SUMS").read_text().splitlines()
    assert release.main(["0.2.0", "--again"]) == 0
    assert release.git(tree, "status", "--porcelain") == ""
    again = (dist / "SHA256SUMS").read_text().splitlines()
    assert set(sums) ^ set(again) == {
        line
        for line in {*sums, *again}
        if "whl" in line  # ours counts commits
    }
    assert release.main(["0.3.0", "--again"]) == 1
    assert "0.3.0 is not set here" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("path", "text", "sentence"),
    [
        ("new.txt", "", "commit, or take away, what is new here: new.txt"),
        ("CHANGELOG.md", "# Changelog\n\n## Unreleased\n", "has nothing under"),
        ("README.md", "pip install ringcomm==0.1.0\n", "stands in README.md, too"),
        ("ci/wheels", "#!/bin/sh\nexit 1\n", "ci/wheels failed"),
        (
            "ci/wheels",
            "#!/bin/sh\nmkdir $3; touch $3/ringcomm-0.0.1-x.whl\n",
            "made ringcomm-0.0.1",
        ),
    ],
)
def test_what_goes_wrong_is_one_sentence_and_changes_nothing(tree, path, text, sentence, capfd):
    (tree / path).write_text(text)
    if path != "new.txt":
        commit(tree)
    before = contents(tree)
    assert release.main(["0.2.0"]) == 1
    assert sentence in capfd.readouterr().err
    assert contents(tree) == before


@pytest.mark.parametrize("path", sorted(ROOT.glob(".github/workflows/*.yml")), ids=lambda p: p.stem)
def test_a_workflow_calls_what_is_here_and_pins_what_is_not(path):
    text = path.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", each)] == []
    assert "://" not in text  # no host of a registry
    called = re.findall(r"run: .*?(\.?ci/\w+)", text)
    assert called
    assert [each for each in called if not (ROOT / each).is_file()] == []
    assert "\t" not in text
