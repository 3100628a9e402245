"""The docs say what the code does."""

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from matrix import page as matrix
from matrix.faults import FAULTS
from matrix.worlds import WORLDS
from torchmuster.launcher.spec.torchrun import make_parser

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*/README.md")]


def test_the_reference_is_what_the_commands_say():
    script = ROOT / "scripts" / "make-reference"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_torchrun_page_has_a_row_for_every_option():
    page = (ROOT / "docs" / "torchrun.md").read_text()
    table = page.split("## Option by option")[1]
    for action in make_parser({})._actions:
        names = [
            name for name in action.option_strings if name.startswith("--") and "_" not in name
        ]
        for name in names:
            if name != "--help":
                assert f"`{name}`" in table, name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_file_that_the_makefile_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for path in re.findall(r"\b((?:scripts|examples|benchmarks|tests)/[\w./-]+)", makefile):
        assert (ROOT / path).exists(), path


# Beside what the extra `train` has; the other frameworks stand side by side with us in scripts of their own.
OTHERS = {"with_accelerate.py": {"accelerate"}, "with_fabric.py": {"lightning"}}


@pytest.mark.parametrize("script", sorted(ROOT.glob("examples/*/*.py")), ids=lambda path: path.stem)
def test_an_example_needs_nothing_beyond_the_train_extra(script):
    beside = {path.stem for path in script.parent.iterdir()}
    known = sys.stdlib_module_names | beside | {"torch", "numpy", "torchmuster"}
    imported = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            imported |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= known | OTHERS.get(script.name, set())


def test_the_readme_says_how_to_install_from_a_clone():
    page = (ROOT / "README.md").read_text()
    assert "pip install .  " in page
    assert "pip install '.[train]'" in page


def test_a_page_has_one_title_in_index_menu_and_heading():
    index = (ROOT / "docs" / "index.md").read_text()
    rows = dict(re.findall(r"^\| \[([^\]]+)\]\(([\w-]+\.md)\)", index, re.MULTILINE))
    headings = {
        (ROOT / "docs" / page).read_text().partition("\n")[0].removeprefix("# "): page
        for page in rows.values()
    }
    assert rows == headings
    menu = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert re.findall(r"- [^\n:]+: [\w-]+\.md", menu) == [], "a page's title is its heading"


def test_the_index_names_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    pages = {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}
    assert pages == set(re.findall(r"\]\(([\w-]+\.md)\)", index))


# The page that compares scripts counts their lines as they are.

SIDE_BY_SIDE = ROOT / "examples" / "side_by_side"
COMPARED = {
    "torchmuster": "with_torchmuster.py",
    "raw DDP, by hand": "with_ddp.py",
    "Fabric": "with_fabric.py",
    "Accelerate": "with_accelerate.py",
}


def num_changed_lines(name):
    """Return how many lines `name` has that the one-GPU script has not; blank ones don't count."""
    before, after = (
        (SIDE_BY_SIDE / file).read_text().splitlines() for file in ("one_gpu.py", name)
    )
    found = difflib.ndiff(before, after)
    return sum(1 for line in found if line.startswith("+ ") and line[2:].strip())


@pytest.mark.parametrize("label", COMPARED)
def test_the_table_has_the_number_of_lines_that_the_script_has(label):
    page = (ROOT / "docs" / "train.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {label} |")]
    assert row.split("|")[2].strip() == str(num_changed_lines(COMPARED[label]))


def test_five_changed_lines_are_enough():
    assert num_changed_lines("with_torchmuster.py") <= 5


def test_the_diff_in_the_page_is_that_of_the_scripts():
    page = (ROOT / "docs" / "train.md").read_text()
    script = (SIDE_BY_SIDE / "with_torchmuster.py").read_text().splitlines()
    shown = [line for line in page.split("```diff")[1].split("```")[0].splitlines() if line]
    kept = [line[1:] for line in shown if not line.startswith("-") and line.strip()]
    assert kept == [line for line in script if line.strip()]


# The pages for who changes the code name what is there.

INSIDE = (ROOT / "docs" / "inside.md").read_text()
SOURCE = ROOT / "src" / "torchmuster"
WALKS = re.split(r"^## ", INSIDE, flags=re.MULTILINE)[1:]
MAX_FILES = 15


@pytest.mark.parametrize("walk", WALKS, ids=[walk.splitlines()[0] for walk in WALKS])
def test_a_walk_passes_few_files_and_each_exists(walk):
    files = re.findall(r"^\| \d+ \| `([\w/.]+)` \|", walk, re.MULTILINE)

    assert 0 < len(files) <= MAX_FILES
    assert [name for name in files if not (SOURCE / name).is_file()] == []


def test_there_are_six_walks():
    assert len(WALKS) == 6


def test_every_room_has_its_row():
    rows = re.findall(r"^\| (`[^|]+`) \|", INSIDE.partition("## ")[0], re.MULTILINE)
    named = set(re.findall(r"`(\w+)/`", " ".join(rows)))

    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert named == folders


def test_the_map_of_contributing_names_what_exists():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| [^|`]+ \|(.*)$", text, re.MULTILINE)
    named = re.findall(r"`((?:src|tests|docs)/[\w/.-]+)`", " ".join(rows))

    assert len(rows) >= 10
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_each_rule_of_the_design_is_of_one_room():
    text = (ROOT / "docs" / "design.md").read_text()
    rules = [int(number) for number in re.findall(r"^(\d+)\. \*\*", text, re.MULTILINE)]
    table = text.partition("| room | rules |")[2].partition("\n\n")[0]
    listed = []
    for _, row in re.findall(r"^\| (\w+) \| ([^|]+) \|$", table, re.MULTILINE):
        for part in row.split(", "):
            first, _, last = part.partition(" to ")
            listed += range(int(first), int(last or first) + 1)

    assert rules == list(range(1, len(rules) + 1))
    assert sorted(listed) == rules


def test_no_page_names_a_folder_that_is_gone():
    gone = r"`(?:node|head|owner|programs|engines|spec|net|model|cli|api|ui|data|files)/[\w/.*]*`"
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    found = {
        f"{page.name}: {name}" for page in pages for name in re.findall(gone, page.read_text())
    }
    assert found == set()


# The matrix of faults on its page is the one that was measured.


def test_the_page_holds_the_measured_matrix():
    assert matrix.PAGE.read_text() == matrix.page(matrix.read()), "make matrix"


def test_every_fault_was_tried_on_every_engine():
    document = matrix.read()
    assert list(document) == list(WORLDS)
    for known in document.values():
        assert list(known["cells"]) == [fault.name for fault in FAULTS]


def test_a_table_names_what_has_failed_and_why_a_cell_is_empty():
    cells = {fault.name: {"word": "ok", "shown_s": 0.55} for fault in FAULTS}
    cells["link"] = {"word": "impossible", "why": "there is no link"}
    cells["disk"] = {"word": "failed", "why": "the cause is rank 1, not 2"}
    lines = matrix.table({"local": {"cells": cells}}).splitlines()
    assert "| link cut | - (1) | not run |" in "\n".join(lines)
    assert "| disk full | **FAILED**: the cause is rank 1, not 2 | not run |" in "\n".join(lines)
    assert lines[-1] == "1. there is no link"
