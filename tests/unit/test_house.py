"""The shape of the source: small folders, no circles, and a unit test's folder for each package."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = SOURCE / "torchmuster"
UNIT = Path(__file__).parent
PAGES = sorted(p for p in (SOURCE.parent / "docs").glob("*.md") if p.stem != "glossary")
MAX_MODULES = 25
MAX_LINES = 900
# One idea a module; a longer one is here with its reason.
MAY_BE_LONG: dict[str, str] = {}


def name_of(path):
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def imports():
    """Return what each module imports of ours, also within functions and under TYPE_CHECKING."""
    files = {name_of(path): path for path in PACKAGE.rglob("*.py")}
    found = {}
    for name, path in files.items():
        named = set()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                of = node.module
                whole = {f"{of}.{alias.name}" for alias in node.names}
                named |= {one if one in files else of for one in whole}
        found[name] = named & set(files) - {name}
    return found


def reachable(start):
    seen, waiting = set(), [start]
    while waiting:
        for name in imports()[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def test_no_modules_import_each_other_in_a_circle():
    assert sorted(name for name in imports() if name in reachable(name)) == []


@pytest.mark.parametrize("folder", sorted(p.parent for p in PACKAGE.rglob("__init__.py")))
def test_a_folder_says_what_it_is_for_and_is_small(folder):
    modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]

    assert ast.get_docstring(tree_of(folder / "__init__.py"))
    assert len(modules) <= MAX_MODULES


def test_a_module_has_one_idea():
    lengths = {
        str(p.relative_to(PACKAGE)): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")
    }

    assert {path for path, length in lengths.items() if length > MAX_LINES} == set(MAY_BE_LONG)


def test_unit_tests_lie_where_their_source_lies():
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")}

    assert [str(path) for path in sorted(folders) if not (PACKAGE / path).is_dir()] == []


def test_every_folder_of_tests_is_run():
    """Say which folder `make test-all` leaves out: its tests would pass for ever."""
    root = SOURCE.parent
    script = (root / "scripts" / "test").read_text()
    folders = {path.relative_to(root).parts[1] for path in (root / "tests").rglob("test_*.py")}
    left_out = {name for name in folders if not re.search(rf"tests/{name}\b", script)}

    assert left_out == set()


def test_a_class_has_its_name_alone():
    names = [
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]

    assert sorted(name for name, times in Counter(names).items() if times > 1) == []


SCHEDULER = re.compile(
    r"slurm|\bpbs|pbs\b|torque|[sq]batch|qsub|qstat|qdel|srun|squeue|sinfo|sacct|scancel|scontrol",
    re.IGNORECASE,
)
# Diagnosis explains schedulers by name; the others have a reason of their own.
MAY_NAME_SCHEDULERS = {
    "diagnose": "looks for the traces and mistakes of each scheduler",
    "core/engines": "their home",
    "kubernetes/engine": "the one of clusters",
    "launcher/engines": "their home",
    "launcher/plug.py": "names the engines",
    "kubernetes/plug.py": "names the engine",
    "launcher/facts": "looks for the traces of each scheduler",
    "workflow/jobs.py": "the jobs of groups, in the words of each",
    "multirun/engine.py": "a session's own",
    "gpucheck": "the lists of GPUs that each of them gives",
    "launcher/model/job.py": "the commands that bring an agent to another node, as values",
    "launcher/model/scheduler.py": "the engine that was removed",
    "launcher/node/launcher_ranks.py": "the rank variables of launchers, rewritten for each worker",
    "core/node/options.py": "variables of one node, and the threads that PBS sets",
    "core/node/setup.py": "the folder that a scheduler has made on this node",
    "launcher/node/spawner/import_watch.py": "variables that a user's script may read",
    "launcher/jobs/spread.py": "what launchers, not schedulers, say of their number of tasks",
    "core/proc.py": "sessions: PBS follows its processes by them",
    "launcher/spec/site.py": "words that people write instead of a key",
    "train": "works in a user's script without an engine",
}


def words_of_code(path):
    """Give names and texts of a file that are no prose: prose has spaces."""
    tree = tree_of(path)
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "module"):
            if isinstance(word := getattr(node, field, None), str):
                yield word
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [] if " " in node.value.strip() else [node.value]


def test_no_two_members_of_an_enum_have_one_value():
    values = {
        f"{path.stem}.{node.name}": [
            ast.unparse(n.value) for n in node.body if isinstance(n, ast.Assign)
        ]
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and any("Enum" in ast.unparse(b) for b in node.bases)
    }

    assert len(values) > 30
    assert [name for name, each in values.items() if len(each) > len(set(each))] == []


def test_no_scheduler_has_its_name_in_code_outside_the_engines():
    named = {
        f"{relative}: {word}"
        for path in PACKAGE.rglob("*.py")
        if not any(
            (relative := str(path.relative_to(PACKAGE))) == free or relative.startswith(f"{free}/")
            for free in MAY_NAME_SCHEDULERS
        )
        for word in words_of_code(path)
        if SCHEDULER.search(word)
    }
    assert sorted(named) == []


# Words of an older vocabulary, and what the field says (docs/glossary.md).
OLD_WORDS = {
    "anew": "again",
    "beats": "heartbeat",
    "beside": "in a thread, spared, next to",
    "card": "info",
    "courier": "remote",
    "crew": "writers",
    "desk": "broker or server",
    "door": "session server",
    "doors": "session servers",
    "gang": "group policy",
    "leashed": "dies_with_parent",
    "luggage": "bundle",
    "mend": "fix",
    "pace": "step state",
    "party": "spread",
    "roll": "membership",
    "standing": "topology",
    "told": "reported, shown or what was reported",
    "way": "launcher",
    "ways": "launchers",
    "whoever": "who",
}
EVERYWHERE = {"anew", "beside", "crew", "door", "doors", "leashed", "told", "whoever"}


def words_of(name):
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def names_in(tree):
    """Return all names of a module: of classes, functions, arguments, variables, attributes."""
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(name, str):
                yield name


def test_no_module_and_no_class_is_named_in_the_old_words():
    names = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in (
            path.stem,
            path.parent.stem,
            *(n.name for n in ast.walk(tree_of(path)) if isinstance(n, ast.ClassDef)),
        )
    }

    assert sorted(name for name in names if set(words_of(name)) & set(OLD_WORDS)) == []


def test_no_name_has_a_word_that_is_read_twice():
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in PACKAGE.rglob("*.py")
        for name in names_in(tree_of(path))
        if set(words_of(name)) & EVERYWHERE
    }

    assert sorted(found) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_says_what_the_glossary_replaced(page):
    found = re.findall(r"\b(?:courier|luggage|gang|mend(?:s|ed)?|crew)\b", page.read_text())
    of_others = {"gang"} if page.stem == "kubernetes" else set()  # its schedulers' own word

    assert [word for word in found if word not in of_others] == []


def test_the_design_lists_the_vocabularies_between_processes():
    """Each is a class of its own kind of message; another one needs a reason, which the design has."""
    text = (SOURCE.parent / "docs" / "design.md").read_text()
    table = text.partition("These vocabularies connect")[2].partition("\nTo place a line")[0]
    listed = set(re.findall(r"^\| `([\w/]+(?:\.py|/))` \|", table, re.MULTILINE))
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and "TypedMessage" in map(ast.unparse, node.bases):
                inside = path.relative_to(PACKAGE)
                found.add(f"{inside.parent}/" if path.stem == "base" else str(inside))
    assert found == listed
