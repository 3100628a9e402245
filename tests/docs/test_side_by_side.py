"""The page that compares scripts counts their lines as they are."""

import difflib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "side_by_side"
ROWS = {
    "torchmuster": "with_torchmuster.py",
    "raw DDP, by hand": "with_ddp.py",
    "Fabric": "with_fabric.py",
    "Accelerate": "with_accelerate.py",
}


def num_changed_lines(name):
    """Return how many lines `name` has that the one-GPU script has not; blank ones don't count."""
    before, after = ((FOLDER / file).read_text().splitlines() for file in ("one_gpu.py", name))
    found = difflib.ndiff(before, after)
    return sum(1 for line in found if line.startswith("+ ") and line[2:].strip())


@pytest.mark.parametrize("label", ROWS)
def test_the_table_has_the_number_of_lines_that_the_script_has(label):
    page = (ROOT / "docs" / "train.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| {label} |")]
    assert row.split("|")[2].strip() == str(num_changed_lines(ROWS[label]))


def test_five_changed_lines_are_enough():
    assert num_changed_lines("with_torchmuster.py") <= 5


def test_the_diff_in_the_page_is_that_of_the_scripts():
    page = (ROOT / "docs" / "train.md").read_text()
    script = (FOLDER / "with_torchmuster.py").read_text().splitlines()
    shown = [line for line in page.split("```diff")[1].split("```")[0].splitlines() if line]
    kept = [line[1:] for line in shown if not line.startswith("-") and line.strip()]
    assert kept == [line for line in script if line.strip()]
