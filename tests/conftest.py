"""What all tests share: a world of their own, golden files, and hypothesis without a clock or a database."""

import atexit
import os

import pytest
from hypothesis import settings

from kit import world
from kit.transcripts import read_sections, write_section

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
    """Return a check that a text is what a golden transcript holds for this case."""
    update = request.config.getoption("--update-golden")

    def check(transcript, case, text):
        if update:
            write_section(transcript, case, text)
        sections = read_sections(transcript)
        assert case in sections, f"no {case} in tests/golden/{transcript}: pytest --update-golden"
        assert text == sections[case], f"differs from {case} in tests/golden/{transcript}"

    return check
