"""What doctor and lint say: every text is used, and its placeholders are the words that its callers give."""

import ast
import re
import string
import types
import typing
from pathlib import Path

import click
import pytest

import torchmuster
from kit import tables
from torchmuster.core.cli.main import muster
from torchmuster.diagnose.doctor import checks
from torchmuster.diagnose.doctor.show import NodeView
from torchmuster.diagnose.finding import Finding, Level, read_texts, render, worst_first
from torchmuster.diagnose.lint import starts
from torchmuster.diagnose.lint.job import Option
from torchmuster.diagnose.lint.shell import Assignment, ShellCommand
from torchmuster.launcher.facts.collect import CollectedFacts
from torchmuster.launcher.files.paragraphs import read_paragraphs

DIAGNOSE = Path(torchmuster.__file__).parent / "diagnose"
DOCTOR = [*sorted((DIAGNOSE / "doctor").glob("*.py")), DIAGNOSE / "gather.py"]
LINT = sorted((DIAGNOSE / "lint").glob("*.py"))
SETTINGS = {"level", "at", "line"}
FROM_FORM = {
    "finding": {"nodes", "has"},
    "Check": {"nodes", "has", "node", "facts"},
    "Equal": {"nodes", "has", "text"},
    "view": {"it", "view"},
}
IT = (starts.ScriptStart, ShellCommand, Assignment, Option)


def keys_of(node, functions):
    """Return the keys of the dictionary that an expression makes, or that a function which it names returns."""
    made = [n for n in ast.walk(node) if isinstance(n, ast.Dict)]
    named = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & set(functions)
    returns = [n for name in named for n in ast.walk(functions[name]) if isinstance(n, ast.Return)]
    keys = {key.value for one in made for key in one.keys}
    return keys.union(*(keys_of(n, functions) for n in returns))


def given_to(call, function, functions):
    """Return the words of a call by name."""
    words = {keyword.arg for keyword in call.keywords if keyword.arg} - SETTINGS
    for keyword in call.keywords:
        if keyword.arg is None:
            (value,) = [
                node.value
                for node in ast.walk(function)
                if isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == ast.unparse(keyword.value)
            ]
            words |= keys_of(value, functions)
    return words


def names_in(node, texts):
    """Return the names of texts in an expression."""
    constants = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)}
    return {value for value in constants if isinstance(value, str) and value in texts}


def names_in_variables(function, texts):
    """Return the names of texts that a function chooses before it uses them."""
    values = [n.value for n in ast.walk(function) if isinstance(n, ast.Assign)]
    return set().union(*(names_in(value, texts) for value in values))


def calls_in(path, texts):
    """Yield the form of every use of texts in a file, its line, the names of the texts, and the words."""
    tree = ast.parse(path.read_text())
    functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    tables = ast.Module([n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign)], [])
    within = {id(n): f for f in functions.values() for n in ast.walk(f)}
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        function = within.get(id(call), tree)
        called = ast.unparse(call.func)
        if called == "view.finding":
            form, chosen, words = "view", call.args[0], given_to(call, function, functions)
        elif called.startswith("TEXTS[") and called.endswith(".finding"):
            form, chosen, words = "finding", call.func, given_to(call, function, functions)
        elif called in ("Check", "Equal") and "TEXTS" in ast.unparse(call.args[0]):
            made = [k.value for k in call.keywords if k.arg == "words"]
            words = set().union(*(keys_of(value, functions) for value in made))
            form, chosen = called, call.args[0]
        else:
            continue
        # A name in a variable is one of those in the function, or in a table of the module.
        names = (
            names_in(chosen, texts)
            or names_in_variables(function, texts)
            or names_in(tables, texts)
        )
        yield form, f"{path.name}:{call.lineno}", names, words


CALLS = {
    "doctor": (checks.TEXTS, [c for path in DOCTOR for c in calls_in(path, checks.TEXTS)]),
    "lint": (starts.TEXTS, [c for path in LINT for c in calls_in(path, starts.TEXTS)]),
}
USES = [(t[name], *call) for t, calls in CALLS.values() for call in calls for name in call[2]]


def placeholders(text):
    """Return what a text's placeholders name: a word and attributes, up to the first index."""
    lines = [text.error, *text.because, text.hint or ""]
    found = [name for line in lines for _, name, _, _ in string.Formatter().parse(line) if name]
    return {name.partition("[")[0] for name in found}


def has_path(kind, path):
    """Return whether a value of a type has the attributes."""
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if not path:
        return True
    for option in options:
        found = getattr(option, path[0], None)
        hinted = found.fget if isinstance(found, property) else option
        name = "return" if isinstance(found, property) else path[0]
        hints = typing.get_type_hints(hinted) if option is not type(None) else {}
        if name in hints and has_path(hints[name], path[1:]):
            return True
    return False


@pytest.mark.parametrize(("text", "form", "where", "names", "words"), USES)
def test_a_text_is_filled_by_each_of_its_callers(text, form, where, names, words):
    facts = typing.get_type_hints(CollectedFacts).get(text.of)
    kinds = {"view": (starts.ScriptView,), "it": IT, "node": (NodeView,), "facts": (facts,)}
    if form != "Check":
        del kinds["facts"], kinds["node"]
    for placeholder in placeholders(text):
        root, *path = placeholder.split(".")
        assert root in words | FROM_FORM[form], f"{where} gives no {root}"
        if root in kinds and root not in words:
            assert any(has_path(kind, path) for kind in kinds[root]), f"{where}: {placeholder}"


@pytest.mark.parametrize("what", CALLS)
def test_every_text_is_said_and_every_word_is_used(what):
    texts, calls = CALLS[what]
    assert {name for _, _, names, _ in calls for name in names} == set(texts)
    for form, where, names, words in calls:
        used = {p.split(".")[0] for name in names for p in placeholders(texts[name])}
        assert words <= used or form == "Check", where  # checks share functions for their words


@pytest.mark.parametrize(
    "lines",
    ["becuase: x", "level: bad", "certain: true", "hint: two", "weight: much"],
)
def test_a_mistake_in_a_file_of_texts_is_refused_when_it_is_read(tmp_path, lines):
    path = tmp_path / "texts.txt"
    path.write_text(f"[one]\nerror: it fails\nhint: one\n{lines}\n")
    with pytest.raises(ValueError, match=r"texts.txt, line 1: one: "):
        read_texts(str(path))


def test_a_text_without_its_error_is_refused(tmp_path):
    path = tmp_path / "texts.txt"
    path.write_text("[one]\nhint: one\n")
    with pytest.raises(ValueError, match="error"):
        read_texts(str(path))


# A finding is printed in the form of every message, and the worst stands first.


def finding(level=Level.WARNING, **more):
    return Finding(level=level, cause="c", error="e", **more)


def test_a_finding_has_the_form_of_every_message_with_its_level_first():
    told = finding(at="n1", because=("b", "more"), hint="h")
    assert render(told) == "warning: e\n  at: n1\n  because: b\n    more\nhint: h\n"
    assert render(finding(), "error") == "error: e\n"


def test_the_worst_comes_first():
    note, failure = finding(Level.NOTE, weight=9), finding(Level.FAILURE)
    certain = finding(Level.FAILURE, is_certain=True)
    heavy = finding(Level.FAILURE, weight=1)
    assert worst_first([note, failure, heavy, certain]) == [certain, heavy, failure, note]


# Hints of doctor and lint name commands and options that exist.


FILES = [*DOCTOR, *LINT, *(DIAGNOSE / "doctor").glob("*.txt"), *(DIAGNOSE / "lint").glob("*.txt")]
# What hints tell people to call, beside muster itself; all but shell words belong to their scheduler, launcher or system.
TOOLS = tables.words("""
    chronyc chmod conda df docker ethtool fi_info find fuser hostname ibstat ip iptables ls
    mount muster nft nstat nvidia-smi numactl ping pip python sbatch scontrol sed
    sinfo sort squeue srun ssh sysctl systemctl timedatectl torchrun ulimit wc
""")
MESSAGES = ["address", "invalid"]  # `address already in use`, `invalid device ordinal`
SKIPPED_OPTIONS = {"torchrun"}  # its options are torchrun's own


def hints_of(path):
    """Return the texts in a file that are hints, or name a command of muster."""
    if path.suffix == ".txt":
        for paragraph in read_paragraphs(path):
            yield from (text for texts in paragraph.fields.values() for text in texts)
        return
    nodes = list(ast.walk(ast.parse(path.read_text())))
    bodies = [node.body for node in nodes if isinstance(getattr(node, "body", None), list)]
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [p.value if isinstance(p, ast.Constant) else "X" for p in node.values]
            yield "".join(str(p) for p in parts)
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            yield str(node.value)


def commands_in(text):
    """Return command and options of every `muster COMMAND --option` in a text; a comma or a full stop ends it."""
    for match in re.finditer(r"(?<![/\w.-])muster ([a-z][a-z-]+)((?: [^,;`|()]*)?)", text):
        yield match[1], re.findall(r"(?<=\s)(--[a-z][a-z-]*)", match[2])


TEXTS = [text for path in FILES for text in hints_of(path)]
NAMED = sorted({(c, tuple(o)) for text in TEXTS for c, o in commands_in(text)})
QUOTED = sorted(
    {word for text in TEXTS for word in re.findall(r"`([a-z][a-z0-9_-]+) [^`]+`", text)}
)
# Words behind `muster` in a sentence: `muster names a node`.
VERBS = tables.words("""
    adds avoids chooses finds gets itself names never passes sets takes tells tries uses
""")


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


@pytest.mark.parametrize("tool", QUOTED)
def test_a_quoted_command_is_of_a_known_tool(tool):
    assert tool in TOOLS + MESSAGES
