"""The commit of a run's folder, from git's files."""

import pytest

from ringcomm.launch.job.command import commit_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def repository(folder, head):
    (folder / ".git" / "refs" / "heads").mkdir(parents=True)
    (folder / ".git" / "HEAD").write_text(head)
    return folder / ".git"


def test_a_branch_is_followed_also_when_it_is_packed(tmp_path):
    git = repository(tmp_path, "ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{COMMIT} refs/heads/main\n")
    (tmp_path / "below").mkdir()
    assert commit_of(tmp_path / "below") == COMMIT
    (git / "refs" / "heads" / "main").write_text(f"{COMMIT[::-1]}\n")
    assert commit_of(tmp_path) == COMMIT[::-1]


def test_a_worktree_has_its_own_head(tmp_path):
    git = repository(tmp_path, "ref: refs/heads/main\n")
    (git / "refs" / "heads" / "side").write_text(f"{COMMIT}\n")
    (git / "worktrees" / "w").mkdir(parents=True)
    (git / "worktrees" / "w" / "HEAD").write_text("ref: refs/heads/side\n")
    (git / "worktrees" / "w" / "commondir").write_text("../..\n")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / ".git").write_text(f"gitdir: {git}/worktrees/w\n")
    assert commit_of(tmp_path / "tree") == COMMIT


@pytest.mark.parametrize("head", ["", "ref: refs/heads/none\n", "no commit\n", "\xff\xff"])
def test_what_is_no_commit_is_none(head, tmp_path):
    repository(tmp_path, head)
    assert commit_of(tmp_path) == ""
    assert commit_of(tmp_path / ".git" / "refs") == ""
