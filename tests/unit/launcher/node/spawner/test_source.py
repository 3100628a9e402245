import sys

import pytest

from torchmuster.launcher.node.spawner import source as sources

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
    'import os\nfor k, v in {"OMP_NUM_THREADS": "3"}.items():\n    os.environ[k] = v',
    'import os\nfor k in ["HOME", "OMP_NUM_THREADS"]:\n    os.environ.setdefault(k, "3")',
    'import os\nNAME = "OMP_NUM_THREADS"\nos.environ[NAME] = "3"',
    'from os import environ as E\nE["OMP_NUM_THREADS"] = "3"',
    'import os\nenv = os.environ\nenv["OMP_NUM_THREADS"] = "3"',
    'import os\nos.environb[b"OMP_NUM_THREADS"] = b"3"',
    'import os\nfor lib in ("OMP", "ABC"):\n    os.environ[f"{lib}_NUM_THREADS"] = "3"',
    'import os\nfor lib in ("OMP", "ABC"):\n    os.environ[lib + "_NUM_THREADS"] = "3"',
    'import os\ncfg = dict(OMP_NUM_THREADS="3")\nos.environ.update(cfg)',
    'import os\ncfg = {}\ncfg["OMP_NUM_THREADS"] = "3"\nos.environ.update(cfg)',
    'import os\nos.environ.update({**{"OMP_NUM_THREADS": "3"}})',
    'import os\nos.environ.update([("OMP_NUM_THREADS", "3")])',
    'import os\nexec("import os; os.environ[\\"OMP_NUM_THREADS\\"] = \\"3\\"")',
    'from os import putenv as p\np("OMP_NUM_THREADS", "4")',
    'import os\ndef put(env): env["OMP_NUM_THREADS"] = "3"\nput(os.environ)',
    'import os\ndef put(n, *, env): env["OMP_NUM_THREADS"] = str(n)\nput(3, env=os.environ)',
    'import os\ndef put(env=os.environ): env["OMP_NUM_THREADS"] = "3"\nput()',
    'import os\nasync def put(env): env.setdefault("OMP_NUM_THREADS", "3")\nput(os.environ)',
    (
        "import os\ndef put(*envs):\n"
        '    for env in envs: env["OMP_NUM_THREADS"] = "3"\nput({}, os.environ)'
    ),
    (
        "import os\nfrom functools import partial\n"
        'def put(env, n): env["OMP_NUM_THREADS"] = n\npartial(put, os.environ)("3")'
    ),
    (
        "import os\nfrom threading import Thread\n"
        'def put(env): env["OMP_NUM_THREADS"] = "3"\n'
        "Thread(target=put, args=(os.environ,)).start()"
    ),
    (
        "import os\ndef put(env): inner(env)\n"
        'def inner(e): e["OMP_NUM_THREADS"] = "3"\nput(os.environ)'
    ),
    (
        "import os\nclass C:\n    def __init__(self):\n        self.env = os.environ\n"
        '        self.env["OMP_NUM_THREADS"] = "3"'
    ),
    (
        "import os\nclass C:\n    def __init__(self, env): self.env = env\n"
        '    def go(self): self.env.update(OMP_NUM_THREADS="3")\nC(os.environ).go()'
    ),
    (
        "import os\nclass C:\n    env = os.environ\n"
        '    def go(self): self.env["OMP_NUM_THREADS"] = "3"'
    ),
    (
        "import os\n@dataclass\nclass C:\n    n: int\n    env: dict\n"
        'c = C(1, os.environ)\nc.env["OMP_NUM_THREADS"] = "3"'
    ),
    (
        "import os\nclass C:\n    @property\n    def env(self): return os.environ\n"
        'C().env["OMP_NUM_THREADS"] = "3"'
    ),
    'import os\ndef env(): return os.environ\nenv()["OMP_NUM_THREADS"] = "3"',
    'import os\nenv = lambda: os.environ\nenv()["OMP_NUM_THREADS"] = "3"',
    'import os\ngetattr(os, "environ")["OMP_NUM_THREADS"] = "3"',
    'import os\nNAME = "environ"\nenv = getattr(os, NAME)\nenv["OMP_NUM_THREADS"] = "3"',
    'import os\nvars(os)["environ"]["OMP_NUM_THREADS"] = "3"',
    'import os\nenv = None or os.environ\nenv["OMP_NUM_THREADS"] = "3"',
    'import os\nenv = os.environ if input() else {}\nenv["OMP_NUM_THREADS"] = "3"',
    'import os\n(env := os.environ)["OMP_NUM_THREADS"] = "3"',
    'import os\nctx = {"env": os.environ}\nctx["env"]["OMP_NUM_THREADS"] = "3"',
    'import os\nfor env in [os.environ, {}]: env["OMP_NUM_THREADS"] = "3"',
    'import os\nsetattr(args, "env", os.environ)\nargs.env["OMP_NUM_THREADS"] = "3"',
    'import os\nput = os.environ.setdefault\nput("OMP_NUM_THREADS", "3")',
    'import os\nput = os.putenv\nput("OMP_NUM_THREADS", "3")',
    'import os\ngetattr(os, "putenv")("OMP_NUM_THREADS", "3")',
    'import ctypes\nctypes.CDLL(None).setenv(b"OMP_NUM_THREADS", b"3", 1)',
    'import os, operator\noperator.setitem(os.environ, "OMP_NUM_THREADS", "3")',
    'import os\nMutableMapping.update(os.environ, {"OMP_NUM_THREADS": "3"})',
    'import os\nmock.patch.dict(os.environ, {"OMP_NUM_THREADS": "3"}).start()',
    'mock.patch.dict("os.environ", OMP_NUM_THREADS="3").start()',
    'import os\nos.environ.pop("OMP_NUM_THREADS", None)',
    'import os\ndel os.environ["OMP_NUM_THREADS"]',
    'import os\nos.unsetenv("OMP_NUM_THREADS")',
    'import os\nos.environ["HOME"], os.environ["OMP_NUM_THREADS"] = "a", "3"',
    'import os\neval("os.environ.update(OMP_NUM_THREADS=\\"3\\")")',
]
UNREADABLE = [
    'import os, sys\nos.environ[sys.argv[1]] = "3"',
    'import os\ndef put(name): os.environ[name] = "3"\nput("OMP_NUM_THREADS")\n',
    "import os, json\nos.environ.update(json.load(open('env.json')))",
    "import os, json\nfor k, v in json.load(open('env.json')).items(): os.environ[k] = v",
    'import os\nlib = input()\nos.environ[f"{lib}_NUM_THREADS"] = "3"',
    'import os\nlib = input()\nos.environ[f"O{lib}"] = "3"',
    "import os\nos.environ.setdefault(*('OMP_NUM_THREADS', '3'))",
    "import os\nos.environ.update(**dict(os.environ))",
    "import os\nlist(map(os.environ.setdefault, names, values))",
    "import os\nos.environ.clear()",
    "import os\nfor name in list(os.environ): del os.environ[name]",
]
SETS_NOTHING_THAT_MATTERS = [
    "",
    'import os\nprint(os.environ["OMP_NUM_THREADS"])',
    'import os\nos.environ.get("OMP_NUM_THREADS", "4")',
    'settings = {}\nsettings["OMP_NUM_THREADS"] = "4"',
    'settings = {}\nsettings.update(OMP_NUM_THREADS="4")',
    'import os\nos.environ["WANDB_MODE"] = "offline"',
    'import os\nos.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"',
    '# os.environ["OMP_NUM_THREADS"] = "4"',
    'text = \'os.environ["OMP_NUM_THREADS"] = "4"\'',
    'import os\nos.environ["OMP_NUM_THREADS"',
    'import os\nenv = os.environ.copy()\nenv["OMP_NUM_THREADS"] = "4"',
    'import os\nenv = dict(os.environ)\nenv[input()] = "4"',
    'import os\nname = input()\nos.environ[f"WANDB_{name}"] = "4"',
    'import os\nname = input()\nos.environ[f"TORCHELASTIC_{name}"] = "4"',
    'import os\nPORT = "MASTER_PORT"\nos.environ[PORT] = "1"',
    'import os\nfor k in ("RANK", "WORLD_SIZE"): os.environ[k] = os.environ["SLURM_" + k]',
    "exec(open('configurator.py').read())",
    'import os\ndef put(env): env["OMP_NUM_THREADS"] = "3"\nput(dict(os.environ))',
    'import os\ndef put(env): env["OMP_NUM_THREADS"] = "3"\nput({**os.environ})',
    'import os\ndef put(env): env["WANDB_MODE"] = "offline"\nput(os.environ)',
    "import os\ndef show(env): return {k: env[k] for k in env}\nshow(os.environ)",
    'import os, subprocess\nsubprocess.run(["ls"], env=os.environ)',
    'import os, subprocess\nsubprocess.run(["ls"], env=dict(os.environ, OMP_NUM_THREADS="3"))',
    'import os, subprocess\nsubprocess.run(["ls"], env={**os.environ, "OMP_NUM_THREADS": "3"})',
    'import os\nenv = {}\nenv.update(os.environ, OMP_NUM_THREADS="3")',
    'import os\nenv = os.environ | {"OMP_NUM_THREADS": "3"}\nenv[input()] = "3"',
    (
        "import os\nclass C:\n    def __init__(self): self.env = os.environ.copy()\n"
        '    def go(self): self.env["OMP_NUM_THREADS"] = "3"'
    ),
    'import os\ncfg = ChainMap({}, os.environ)\ncfg["OMP_NUM_THREADS"] = "3"',
    (
        "import os\nconfigure(os.environ)\n"
        "print(sorted(os.environ), len(os.environ), json.dumps(os.environ))"
    ),
    'import os\nget = os.environ.get\nget("OMP_NUM_THREADS", input())',
    'import os\nrank = int(getattr(args, "rank", os.environ.get("RANK", 0)))\nlogs[rank] = "x"',
    'import os\nos.environ.pop("LOCAL_RANK", None)\nargs.pop("OMP_NUM_THREADS")',
]


@pytest.mark.parametrize("source", SETS_OMP)
def test_a_variable_that_the_source_sets_is_found(source):
    assert sources.environment_writes(source.encode()) == sources.Writes(names=("OMP_NUM_THREADS",))


@pytest.mark.parametrize("source", SETS_NOTHING_THAT_MATTERS)
def test_what_is_only_read_or_does_not_matter_is_not_found(source):
    assert sources.environment_writes(source.encode()) == sources.Writes()


@pytest.mark.parametrize("source", UNREADABLE)
def test_a_write_whose_name_the_source_does_not_tell_is_found(source):
    line = source.count("\n", 0, source.index("environ")) + 1
    assert sources.environment_writes(source.encode()) == sources.Writes(unread_line=line)


def test_each_variable_is_named_once_in_the_order_of_the_source():
    source = b'import os\nfor n in ("MKL_X", "KMP_Y", "MKL_X"):\n    pass\n'
    source += b"".join(b'os.environ["%s"] = "1"\n' % n for n in (b"MKL_X", b"KMP_Y", b"MKL_X"))

    assert sources.environment_writes(source).names == ("MKL_X", "KMP_Y")


@pytest.mark.parametrize("source", [b"\x00", b"\xff\xfe", b"def", b"(" * 2000])
def test_a_source_that_can_t_be_parsed_sets_nothing(source):
    assert sources.environment_writes(source) == sources.Writes()


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
    assert sources.script_path("module", module) == str(package / path)
    assert "pkg" not in sys.modules


@pytest.mark.parametrize("module", ["pkg", "pkg.missing", "missing.train", "pkg.train.deeper"])
def test_a_module_that_can_t_be_run_has_no_file(package, module):
    assert sources.script_path("module", module) is None


def test_a_module_of_the_working_directory_is_found(package, monkeypatch):
    monkeypatch.chdir(package / "pkg")

    assert sources.script_path("module", "train") == str(package / "pkg" / "train.py")


def test_a_script_is_its_own_file_and_a_command_has_none():
    assert sources.script_path("file", "a/b.py") == "a/b.py"
    assert sources.script_path("command", "bash") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"import torch", {"torch"}),
        (b"def main():\n    from torch.nn import Linear", {"torch.nn", "torch.nn.Linear"}),
        (b"import torch.distributed as dist", {"torch.distributed"}),
        (b"from torchmuster import train as tm", {"torchmuster", "torchmuster.train"}),
        (b"import torchvision, json", {"torchvision", "json"}),
        (b"from . import torch", set()),
        (b"torch = 1", set()),
        (b"import (", set()),
        (b"", set()),
    ],
)
def test_what_is_imported_is_seen_anywhere_in_the_source(text, expected):
    assert sources.imported_names(text) == expected


CONFIGURES = "import logging.config\nlogging.config.dictConfig({'version': 1})\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CONFIGURES + "import torch", ("dictConfig", 2)),
        (CONFIGURES + "from torch import nn", ("dictConfig", 2)),
        (CONFIGURES + "import lightning", ("dictConfig", 2)),
        ("import os\nos.sched_setaffinity(0, {0})\nimport torch", ("sched_setaffinity", 2)),
        ("import torch\n" + CONFIGURES + "import wandb", None),
        (CONFIGURES + "import json", None),
        (CONFIGURES + "def main():\n    import torch", None),
        ("import os\nos.sched_getaffinity(0)\nimport torch", None),
        ("import torch, os\ndef main():\n    os.sched_setaffinity(0, {0})", None),
        ("this is no Python", None),
    ],
)
def test_a_call_that_acts_on_what_torch_makes_counts_before_its_import(text, expected):
    assert sources.early_calls(text.encode()) == expected


@pytest.mark.parametrize("tool", ["cProfile", "pdb", "coverage.__main__", "kernprof"])
def test_of_a_tool_that_runs_a_script_the_script_is_read(tmp_path, monkeypatch, tool):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert sources.script_path("module", tool, ("-o", "out.py", "train.py", "--x.py")) == "train.py"
    assert sources.script_path("module", tool, ("-o", "out.prof")) is None


def test_names_that_lead_to_each_other_many_times_are_looked_at_once():
    lines = [f"n{i % 30} = n{(i * 7 + 1) % 30} + n{(i * 11 + 3) % 30}" for i in range(900)]
    text = "\n".join(
        [*lines, "import os", "os.environ[n0] = '1'", "os.environ.update(n1)", "n2['x'] = 1"]
    )
    assert sources.environment_writes(text.encode()) == sources.Writes(unread_line=902)
