"""What all tests share: a world of their own, golden files, and hypothesis without a clock or a database."""

import atexit
import os
from pathlib import Path

import pytest
from hypothesis import settings

from kit import world

_HOME = world.make_home()
atexit.register(world.remove_home, _HOME)
world.enter(_HOME)

settings.register_profile("muster", deadline=None, max_examples=30, derandomize=True, database=None)
settings.load_profile("muster")


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what the program says now into the golden files, then read their diff",
    )


def pytest_collection_modifyitems(items):
    if os.environ.get("MUSTER_LAB"):
        return
    long_form = pytest.mark.skip(reason="the long form: make lab")
    for item in items:
        if item.get_closest_marker("lab"):
            item.add_marker(long_form)


@pytest.fixture
def golden(request):
    """Return a check that a text is what the golden file of this name holds."""
    update = request.config.getoption("--update-golden")

    def check(name, text):
        path = Path(__file__).parent / "golden" / name
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"no golden file {name}: pytest --update-golden"
        assert text == path.read_text(), f"differs from {name}"

    return check
