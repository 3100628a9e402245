"""Kinds of records: one table says what a folder is the record of, and one what commands do with it."""

import inspect
import re
from pathlib import Path

import pytest

import torchmuster
from torchmuster.core import plugs
from torchmuster.core.files.layout import Kind
from torchmuster.launcher.cli.record import KindCommands

SOURCE = Path(torchmuster.__file__).parent
ASKING = re.compile(r"(?:isfile|exists)\([^)]*\.(?:workflow|sweep)\)|\bis_workflow\b")


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_has_all_that_commands_need(kind):
    module = plugs.find("kinds", f"{kind.value} commands")
    for name, needed in inspect.getmembers(KindCommands, inspect.isfunction):
        if not name.startswith("_"):
            own = inspect.signature(getattr(module, name)).parameters
            assert list(own) == list(inspect.signature(needed).parameters)[1:], (kind, name)
    restart = plugs.find("kinds", f"{kind.value} restart")
    assert list(inspect.signature(restart).parameters) == ["view", "detach"]


def test_nobody_else_asks_what_a_folder_is_the_record_of():
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if ASKING.search(path.read_text())
    }
    assert found == set()  # `RunDir.kind` knows
