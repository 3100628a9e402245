import sys

import pytest

from torchmuster.agent.spawner.source import imports_torch, script_path, variables_set
from torchmuster.model.contract import is_read_at_import

SETS_OMP = [
    'import os\nos.environ["OMP_NUM_THREADS"] = "4"',
    'import os as o\no.environ["OMP_NUM_THREADS"] = "4"',
    'from os import environ\nenviron["OMP_NUM_THREADS"] = "4"',
    'import os\nos.environ.setdefault("OMP_NUM_THREADS", "4")',
    'import os\nos.environ.update({"OMP_NUM_THREADS": "4"})',
    'import os\nos.environ.update(OMP_NUM_THREADS="4")',
    'import os\nos.environ |= {"OMP_NUM_THREADS": "4"}',
    'import os\nos.environ.update(dict(OMP_NUM_THREADS="4"))',
    'import os\nos.putenv("OMP_NUM_THREADS", "4")',
    'from os import putenv\nputenv("OMP_NUM_THREADS", "4")',
    'import os\nif True:\n    def f():\n        os.environ["OMP_NUM_THREADS"] = "4"',
    'import os\nos.environ["HOME"] = os.environ["OMP_NUM_THREADS"] = "4"',
    'import os\nos.environ["OMP_NUM_THREADS"]: str = "4"',
    'import os\nos.environ.__setitem__("OMP_NUM_THREADS", "4")',
]
SETS_NOTHING_THAT_MATTERS = [
    "",
    'import os\nprint(os.environ["OMP_NUM_THREADS"])',
    'import os\nos.environ.get("OMP_NUM_THREADS", "4")',
    'import os\nos.environ.pop("OMP_NUM_THREADS", None)',
    'settings = {}\nsettings["OMP_NUM_THREADS"] = "4"',
    'settings = {}\nsettings.update(OMP_NUM_THREADS="4")',
    'import os\nos.environ["WANDB_MODE"] = "offline"',
    'import os\nos.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"',
    '# os.environ["OMP_NUM_THREADS"] = "4"',
    'text = \'os.environ["OMP_NUM_THREADS"] = "4"\'',
    'import os\nos.environ["OMP_NUM_THREADS"',
]


@pytest.mark.parametrize("source", SETS_OMP)
def test_a_variable_that_the_source_sets_is_found(source):
    assert variables_set(source.encode(), is_read_at_import) == ["OMP_NUM_THREADS"]


@pytest.mark.parametrize("source", SETS_NOTHING_THAT_MATTERS)
def test_what_is_only_read_or_does_not_matter_is_not_found(source):
    assert variables_set(source.encode(), is_read_at_import) == []


def test_each_variable_is_named_once_in_the_order_of_the_source():
    source = b'import os\nfor n in ("MKL_X", "KMP_Y", "MKL_X"):\n    pass\n'
    source += b"".join(b'os.environ["%s"] = "1"\n' % n for n in (b"MKL_X", b"KMP_Y", b"MKL_X"))

    assert variables_set(source, is_read_at_import) == ["MKL_X", "KMP_Y"]


@pytest.mark.parametrize("source", [b"\x00", b"\xff\xfe", b"def", b"(" * 2000])
def test_a_source_that_can_t_be_parsed_sets_nothing(source):
    assert variables_set(source, is_read_at_import) == []


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose import would be noticed, on the path."""
    for name in ("pkg", "pkg/sub"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "pkg" / "train.py").write_text("")
    (tmp_path / "pkg" / "sub" / "__main__.py").write_text("")
    (tmp_path / "spaces" / "deep").mkdir(parents=True)
    (tmp_path / "spaces" / "deep" / "train.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("pkg.train", "pkg/train.py"),
        ("pkg.sub", "pkg/sub/__main__.py"),
        ("spaces.deep.train", "spaces/deep/train.py"),
    ],
)
def test_the_file_of_a_module_is_found_without_importing_its_package(package, module, path):
    assert script_path("module", module) == str(package / path)
    assert "pkg" not in sys.modules


@pytest.mark.parametrize("module", ["pkg", "pkg.missing", "missing.train", "pkg.train.deeper"])
def test_a_module_that_can_t_be_run_has_no_file(package, module):
    assert script_path("module", module) is None


def test_a_module_of_the_working_directory_is_found(package, monkeypatch):
    monkeypatch.chdir(package / "pkg")

    assert script_path("module", "train") == str(package / "pkg" / "train.py")


def test_a_script_is_its_own_file_and_a_command_has_none():
    assert script_path("file", "a/b.py") == "a/b.py"
    assert script_path("command", "bash") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"import torch", True),
        (b"def main():\n    from torch.nn import Linear", True),
        (b"import torch.distributed as dist", True),
        (b"import torchvision, json", False),
        (b"from . import torch", False),
        (b"torch = 1", False),
        (b"import (", False),
        (b"", False),
    ],
)
def test_an_import_of_torch_is_seen_anywhere_in_the_source(text, expected):
    assert imports_torch(text) is expected
