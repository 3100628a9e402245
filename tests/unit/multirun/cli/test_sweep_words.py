"""Which scripts need no process with torch to be forked from."""

import pytest

from torchmuster.multirun.cli.sweep_words import needs_only_the_standard_library


@pytest.mark.parametrize(
    ("text", "needs_no_more"),
    [
        ("import os, json.decoder\nfrom math import pi", True),
        ("import torch", False),
        ("def f():\n    from torch import nn", False),
        ("import helper", True),
        ("import model", False),
        ("import numpy", False),
        ("import importlib", False),
        ("__import__('tor' + 'ch')", False),
        ("from . import x", False),
        ("this is no python", False),
    ],
)
def test_a_script_needs_what_it_and_its_neighbours_import(tmp_path, text, needs_no_more):
    (tmp_path / "helper.py").write_text("import time\nimport script")
    (tmp_path / "model.py").write_text("import helper, torch.nn")
    script = tmp_path / "script.py"
    script.write_text(text)
    assert needs_only_the_standard_library(str(script)) == needs_no_more


def test_a_script_that_is_not_there_is_not_judged(tmp_path):
    assert not needs_only_the_standard_library(str(tmp_path / "none.py"))
