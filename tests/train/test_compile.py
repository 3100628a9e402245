"""A compiled model trains as a plain one, and has plain names."""

import shutil
from pathlib import Path

import pytest

from launching import muster

SCRIPT = Path(__file__).with_name("compile_script.py")


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
def test_a_compiled_model_trains_as_a_plain_one_and_keeps_its_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    said = {}
    for kind in ("plain", "compiled"):
        ended = muster(tmp_path / kind, 2, SCRIPT, kind)
        (said[kind],) = [line for line in ended.stdout.splitlines() if line.startswith("losses")]
    assert said["compiled"] == said["plain"]
    assert "'0.bias', '0.weight', '2.bias', '2.weight'" in said["plain"]
