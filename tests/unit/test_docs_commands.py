"""Each command `ringcomm run` that a page shows has options that there are."""

import re
import shlex
from pathlib import Path

from ringcomm.errors import ConfigError
from ringcomm.launch.job.arguments import parse_arguments

ROOT = Path(__file__).parents[2]
PLACEHOLDER = re.compile(r"\.\.\.|\b(N|MIN|MAX|NAME|VALUE|FOLDER|COMMAND|WHAT)\b")


def test_commands_are_understood(capsys):
    commands = [
        command
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for command in commands_of(page.read_text())
    ]
    assert len(commands) >= 45
    assert [each for each in commands if not is_understood(each)] == [], capsys.readouterr().err


def commands_of(text):
    inline = re.findall(r"`(ringcomm run -[^`]*)`", text)
    lines = re.findall(r"^(?: {4})?(?:\$ |exec )?(ringcomm run -[^\n]*)", text, re.MULTILINE)
    whole = (each for each in inline + lines if ".py" in each or " -m " in each)
    return [each for each in whole if not PLACEHOLDER.search(each)]


def is_understood(command):
    _, _, *words = shlex.split(command, comments=True)
    try:
        parse_arguments(words, "python")
    except (SystemExit, ConfigError):
        return False
    return True
