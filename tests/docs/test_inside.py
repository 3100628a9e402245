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
