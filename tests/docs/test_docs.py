"""The docs say what the code does."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
