"""The pages for who changes the code name what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
