"""docs/errors.md has every public error, and each text that it quotes stands in the sources."""

import inspect
import re
from pathlib import Path

from ringcomm import errors

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()
QUOTES = re.findall(r"^\| `(.*?)` \|", PAGE, re.MULTILINE)


def test_each_public_error_has_a_section():
    public = {name for name, _ in inspect.getmembers(errors, inspect.isclass)}
    headings = set(re.findall(r"^## (\w+Error|\w+Interrupt)$", PAGE, re.MULTILINE))
    assert {name for name in public if issubclass(getattr(errors, name), Exception)} == headings


def test_each_row_quotes_one_text():
    rows = re.findall(r"^\| (?!text \|)(.*)", PAGE, re.MULTILINE)
    assert len(rows) == len(QUOTES) >= 60
    assert all(re.search(r"\| \S.*\. \|$", row) for row in rows)


def test_what_is_quoted_stands_in_the_sources():
    sources = [*(ROOT / "ringcomm").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]
    texts = "\n".join(with_whole_strings(path.read_text()) for path in sources)
    assert [quote for quote in QUOTES if not pattern_of(quote).search(texts)] == []


def pattern_of(quote):
    """Return what finds a quote in a line, in which "..." stands for values, or is its end."""
    parts = (re.escape(part) for part in quote.split("..."))
    return re.compile(r"[^\n]*?[%{+][^\n]*".join(parts))


def with_whole_strings(source):
    """Return the source without docstrings and comments, each string on one line."""
    code = re.sub(r'"""(?:.|\n)*?"""|(?:^|  )(?:#|//) .*', "", source, flags=re.MULTILINE)
    return re.sub(r'"\s*\n\s*[fr]?"', "", code)
