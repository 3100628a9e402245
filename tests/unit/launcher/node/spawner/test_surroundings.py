import site
import sys
from types import SimpleNamespace

import pytest

from torchmuster.core.node.spawner.mainmodule import hidden_modules
from torchmuster.launcher.node.spawner.import_watch import refuses_torch, start_code_with_rank


def test_files_beside_the_script_hide_pythons_modules_of_their_names(tmp_path):
    for name in ("code.py", "train.py", "os.py", "sys.py", "queue.txt", "select.abi3.so"):
        (tmp_path / name).write_text("")
    for name in ("json", "platform"):
        (tmp_path / name).mkdir()
    (tmp_path / "json" / "__init__.py").write_text("")

    assert hidden_modules(str(tmp_path), at_start={"os"}) == ["code", "json", "select"]


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        (
            "import sys\nif 'torch' in sys.modules:\n    raise ImportError('torch came first')\n",
            True,
        ),
        (
            'def deps():\n    if "torch" in sys.modules:\n        # why\n        raise ImportError()\n',
            True,
        ),
        ("if 'torch' in sys.modules:\n    import torch\n", False),
        ("if 'torch' not in sys.modules:\n    raise ImportError()\n", False),
        ("def is_torch(x):\n    return 'torch' in sys.modules\nraise SystemExit\n", False),
    ],
)
def test_a_package_that_wants_to_be_imported_before_torch_is_found(tmp_path, text, refuses):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").write_text("from . import deps\n")
    (tmp_path / "early" / "deps.py").write_text(text)
    names = {"early.api", "json", "torch", "nowhere"}
    assert refuses_torch(names, str(tmp_path)) == ("early" if refuses else None)
    assert refuses_torch({"json", "torch"}, str(tmp_path)) is None


def test_where_nothing_is_put_on_the_path_nothing_is_hidden(tmp_path):
    assert hidden_modules(None, set()) == []
    assert hidden_modules(str(tmp_path / "absent"), set()) == []


@pytest.fixture
def packages(tmp_path, monkeypatch):
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(site, "ENABLE_USER_SITE", False)
    for name in ("sitecustomize", "usercustomize"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    return tmp_path


@pytest.mark.parametrize("words", ["os.environ['RANK']", 'os.getenv("LOCAL_RANK")', "SLURM_PROCID"])
def test_start_code_that_reads_a_rank_is_found(packages, monkeypatch, words):
    path = packages / "sitecustomize.py"
    path.write_text(f"import os\n{words}\n")
    assert start_code_with_rank() is None
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace(__file__=str(path)))
    assert start_code_with_rank() == str(path)


def test_start_code_of_pth_files_is_looked_at_too(packages, monkeypatch):
    (packages / "paths.pth").write_text("/somewhere/RANK\n# import RANK\n")
    assert start_code_with_rank() is None
    (packages / "line.pth").write_text("import os; os.environ.get('RANK')\n")
    assert start_code_with_rank() == str(packages / "line.pth")


def test_a_module_that_a_pth_file_imports_is_looked_at_too(packages, monkeypatch):
    module = packages / "tracer.py"
    module.write_text("import os\nRANK = os.environ.get('RANK')\n")
    (packages / "tracer.pth").write_text("import tracer\n")
    monkeypatch.setitem(sys.modules, "tracer", SimpleNamespace(__file__=str(module)))
    assert start_code_with_rank() == str(module)


@pytest.mark.parametrize("words", ["RANKING = 1", "os.environ['COVERAGE_PROCESS_START']", "frank"])
def test_other_start_code_is_left_alone(packages, monkeypatch, words):
    path = packages / "sitecustomize.py"
    path.write_text(f"import os\n{words}\n")
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace(__file__=str(path)))
    assert start_code_with_rank() is None
