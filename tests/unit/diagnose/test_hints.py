"""Hints of doctor and lint name commands and options that exist."""

import ast
import re
from pathlib import Path

import click
import pytest

import torchmuster
from torchmuster.core.cli.main import muster
from torchmuster.launcher.files.paragraphs import read_paragraphs

PACKAGE = Path(torchmuster.__file__).parent
FILES = [
    *sorted((PACKAGE / "diagnose" / "doctor").glob("*.py")),
    *sorted((PACKAGE / "diagnose" / "doctor").glob("*.txt")),
    *sorted((PACKAGE / "diagnose" / "lint").glob("*.py")),
    *sorted((PACKAGE / "diagnose" / "lint").glob("*.txt")),
    PACKAGE / "diagnose" / "gather.py",
]
# What hints tell people to call, beside muster itself; all but shell words belong to their scheduler, launcher or system.
TOOLS = {
    *(
        "chronyc",
        "chmod",
        "conda",
        "df",
        "docker",
        "ethtool",
        "fi_info",
        "find",
        "fuser",
        "hostname",
        "ibstat",
        "ip",
        "iptables",
        "ls",
    ),
    *(
        "mount",
        "muster",
        "nft",
        "nstat",
        "nvidia-smi",
        "numactl",
        "ping",
        "pip",
        "python",
        "sbatch",
        "scontrol",
        "sed",
    ),
    *(
        "sinfo",
        "sort",
        "squeue",
        "srun",
        "ssh",
        "sysctl",
        "systemctl",
        "timedatectl",
        "torchrun",
        "ulimit",
        "wc",
    ),
}
MESSAGES = {"address", "invalid"}  # `address already in use`, `invalid device ordinal`
SKIPPED_OPTIONS = {"torchrun"}  # its options are torchrun's own


def hints_of(path):
    """Return the texts in a file that are hints, or name a command of muster."""
    if path.suffix == ".txt":
        for paragraph in read_paragraphs(path):
            yield from (text for texts in paragraph.fields.values() for text in texts)
        return
    docstrings = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            docstrings.add(id(body[0].value))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            yield "".join(str(p) for p in parts)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in docstrings
        ):
            yield node.value


def commands_in(text):
    """Return command and options of every `muster COMMAND --option` in a text; a comma or a full stop ends it."""
    for match in re.finditer(r"(?<![/\w.-])muster ([a-z][a-z-]+)((?: [^,;`|()]*)?)", text):
        yield match[1], re.findall(r"(?<=\s)(--[a-z][a-z-]*)", match[2])


NAMED = sorted({(c, tuple(o)) for f in FILES for text in hints_of(f) for c, o in commands_in(text)})
# Words behind `muster` in a sentence: `muster names a node`.
VERBS = {
    "adds",
    "avoids",
    "chooses",
    "finds",
    "gets",
    "itself",
    "names",
    "never",
    "passes",
    "sets",
    "takes",
    "tells",
    "tries",
    "uses",
}


def test_some_hints_name_commands_with_options():
    assert any(options for _, options in NAMED)


@pytest.mark.parametrize(("command", "options"), NAMED)
def test_a_hint_names_a_command_and_options_that_exist(command, options):
    if command in VERBS:
        return
    found = muster.get_command(click.Context(muster), command)
    assert found is not None, f"muster {command}"
    if command not in SKIPPED_OPTIONS:
        known = {word for param in found.params for word in (*param.opts, *param.secondary_opts)}
        assert set(options) <= known | {"--help"}


QUOTED = sorted(
    {
        match[1]
        for f in FILES
        for text in hints_of(f)
        for match in re.finditer(r"`([a-z][a-z0-9_-]+) [^`]+`", text)
    }
)


@pytest.mark.parametrize("tool", QUOTED)
def test_a_quoted_command_is_of_a_known_tool(tool):
    assert tool in TOOLS | MESSAGES
