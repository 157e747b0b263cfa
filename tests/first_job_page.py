"""The program of docs/first_job.md, as each of its steps leaves it."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "first_job.md"
WHOLE = "## The whole program\n"
BLOCK = re.compile(r"```(python|diff)\n(.*?)```", re.DOTALL)


def programs():
    """Return the first program, and that after each diff."""
    steps, _, _ = PAGE.read_text().partition(WHOLE)
    (_, first), *diffs = BLOCK.findall(steps)
    found = [first]
    for _, diff in diffs:
        found.append(changed(found[-1], diff))
    return found


def whole_program():
    """Return the program that the page shows at its end."""
    _, _, end = PAGE.read_text().partition(WHOLE)
    return BLOCK.findall(end)[0][1]


def changed(program, diff):
    """Return the program with the diff made; a line of "..." stands for lines that stay."""
    for hunk in re.split(r"^  \.\.\.\n", diff, flags=re.MULTILINE):
        old, new = (side(hunk, marks) for marks in (" -", " +"))
        assert f"\n{program}".count(f"\n{old}") == 1, f"{old!r} is not once in the program"
        program = f"\n{program}".replace(f"\n{old}", f"\n{new}")[1:]
    return program


def side(hunk, marks):
    lines = (line for line in hunk.splitlines() if not line or line[0] in marks)
    return "".join(f"{line[2:]}\n" for line in lines)
