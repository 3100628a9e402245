"""The imports that a script begins with: which are made in the spawner, and what stops one before it happens."""

import json
import site
import sys
from types import SimpleNamespace

import pytest

from kit.command import SOURCE, ran
from kit.tables import rows
from torchmuster.core.node.spawner.mainmodule import hidden_modules
from torchmuster.launcher.node.spawner.import_watch import (
    is_of_a_worker,
    refuses_torch,
    start_code_with_rank,
)

# What a spawner does with a script, without torch: prints what was made, what stopped it, and what a worker has then.
DRIVER = """
import json, os, sys
from torchmuster.launcher.node.spawner.import_watch import FirstImports, ImportWatch
given = json.loads(sys.argv[1])
renewed = {("drawn", "NAME"), ("drawn", "DRAWN"), ("drawn", "Dummy"), ("lit", "only")}
renewed |= {("forbidden", "NAME"), ("forbidden", "RANK")}
watch = ImportWatch(sys.stdout.flush, renewed)
roots = set(os.listdir(os.environ["PYTHONPATH"].partition(":")[2])) - {"other"}
first = FirstImports(given["text"].encode(), "train.py", os.getcwd(), given["cache"], watch, roots)
sys.path.insert(0, os.getcwd())
first.make(["train.py", "--lr", "1"])
stopped = first.stopped
os.environ.update(given["worker"])
differs = first.what_differs(given["worker"], [])
before = eval(given["asked"]) if given["asked"] else None
if not first.is_spoilt:
    first.renew()
print(json.dumps({
    "made": first.num_made,
    "why": stopped.why if stopped else "",
    "spoilt": first.is_spoilt,
    "differs": differs,
    "before": before,
    "worker": eval(given["asked"]) if given["asked"] else None,
}))
"""


@pytest.fixture
def made(tmp_path):
    """Return what imports of these distributions are made, as a spawner and one worker have them."""
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "driver.py").write_text(DRIVER)
    path = f"{SOURCE}:{tmp_path / 'site-packages'}"

    def make(text, asked="", worker=(), environment=(), **packages):
        for name, source in packages.items():
            folder = tmp_path / "site-packages" / name
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text(source)
        given = {"text": text, "asked": asked, "worker": dict(worker)}
        given["cache"] = str(tmp_path / "cache")
        done = ran(
            [sys.executable, str(tmp_path / "driver.py"), json.dumps(given)],
            limit_s=60,
            cwd=tmp_path / "here",
            env={"PYTHONPATH": path, "HOME": str(tmp_path), **dict(environment)},
        )
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout.splitlines()[-1])
        said["printed"] = done.stdout.splitlines()[:-1] + done.stderr.splitlines()
        return said

    make.folder = tmp_path
    return make


@pytest.mark.parametrize(
    ("text", "num"),
    [
        ("import fine", 1),
        ('"""Words."""\nfrom __future__ import annotations\nimport os\nimport fine, sys\n', 1),
        ("from fine import x\nfrom fine import *\n", 2),
        ("import fine\nimport own\nfrom fine import x\n", 1),  # own may do anything
        ("import fine\nfrom . import own\n", 1),
        ("SEED = 1\nimport fine\n", 0),
        ("import os\nos.environ['A'] = '1'\nimport fine\n", 0),
        ("try:\n    import fine\nexcept ImportError:\n    pass\n", 0),
        ("import nowhere\nimport fine\n", 0),
        ("import other\nimport fine\n", 0),  # nobody has compared it
        ("import fine as", 0),
        ("", 0),
    ],
)
def test_the_imports_of_distributions_that_come_before_everything_else_are_made(made, text, num):
    (made.folder / "here" / "own.py").write_text("")
    said = made(text, fine="x = 1\n", other="")
    assert (said["made"], said["why"]) == (num, "")


FORBIDDEN = {
    what: (source, why)
    for what, why, source in rows(
        r"""
        a thread                            starts a thread                     import threading\nthreading.Thread(target=print).start()
        a child                             starts another process              import os\nif os.fork() == 0: os._exit(0)
        a command                           starts another process              import os\nos.system('touch HERE/made')
        another command                     starts another process              import subprocess\nsubprocess.run(['touch', 'HERE/made'])
        a spawned command                   starts another process              import os\nos.posix_spawn('/bin/touch', ['touch', 'HERE/made'], {})
        a file                              writes HERE/made                    open('HERE/made', 'w').close()
        a file of pathlib                   writes HERE/made                    import pathlib\npathlib.Path('HERE/made').touch()
        text of pathlib                     writes HERE/made                    import pathlib\npathlib.Path('HERE/made').write_text('')
        a log                               writes HERE/made                    import logging\nlogging.basicConfig(filename='HERE/made')
        a folder                            writes HERE/made                    import os\nos.makedirs('HERE/made')
        a temporary file                    writes HERE/tmp                     import tempfile\ntempfile.mkstemp(dir='HERE')
        a renamed file                      writes HERE/there                   import os\nos.rename('HERE/there', 'HERE/made')
        a removed file                      writes HERE/there                   import os\nos.remove('HERE/there')
        an open file                        descriptors                         import os\nkept = os.open('/etc/hostname', os.O_RDONLY)
        an address                          asks for an address                 import socket\nsocket.getaddrinfo('x.invalid', 80)
        a connection                        opens a connection                  import socket\nsocket.socket().connect(('127.0.0.1', 9))
        a datagram                          opens a connection                  import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))
        a print                             prints 'hello'                      print('hello')
        bytes                               prints 'hello'                      import os\nos.write(2, b'hello')
        a warning                           prints                              import warnings\nwarnings.warn('old')
        a handler                           changes a signal handler            import signal\nsignal.signal(signal.SIGTERM, print)
        a handler in C                      leaves other handlers               import signal as s, _signal\n_signal.signal(s.SIGTERM, int(s.SIG_IGN))
        a draw                              draws a random number               import random\nnames = [random.random() for _ in range(2)]\nif random.random(): x = 1
        another draw                        draws a random number               import random\nfor _ in '12': random.gauss(0, 1)
        a random name that another has too  shares                              import uuid, holder\nNAME = uuid.uuid4().hex\nholder.NAME = NAME
        a random name in a list             random                              import uuid\nNAMES = []\nNAMES.append(uuid.uuid4())
        all variables                       reads all environment variables     import os\nkept = dict(os.environ)
        the rank in a function              reads RANK                          import os\ndef ask():\n    return os.environ.get('RANK')\nif ask(): x = 1
        the rank that another has too       shares                              import os, holder\nRANK = os.environ.get('LOCAL_RANK', [0])\nholder.RANK = RANK
        threads of OpenMP                   OMP_NUM_THREADS                     import os\nif os.getenv('OMP_NUM_THREADS'): x = 1
        the time                            keeps the time, as forbidden.BEGUN  import time\nBEGUN = time.time()
        a date                              keeps the time                      import datetime\nBEGUN = datetime.datetime.now()
        an error                            raises ModuleNotFoundError          import nowhere
        an end                              raises SystemExit                   import sys\nsys.exit(3)
        a folder to be in                   leaves other settings               import os\nos.chdir('/')
        a place for modules                 leaves other settings               import sys\nsys.path.insert(0, '/')
        an argument                         leaves other settings               import sys\nsys.argv.remove('--lr')
        a lock of all                       leaves other shared_memory          import mmap\nkept = mmap.mmap(-1, 4096)
        a socket file                       opens a socket                      import socket\nsocket.socket(socket.AF_UNIX).bind('HERE/made')
        a random name                       keeps a random value                import uuid\nTOKEN = uuid.uuid4().hex
        the rank                            reads RANK                          import os\nIS_FIRST = os.environ.get('RANK', '0') == '0'
        an empty line                       prints ''                           print()
        two effects, both swallowed         writes HERE/made                    for _ in '12':\n    try: open('HERE/made', 'w')\n    except BaseException: pass
        a long reason                       writes HERE/xxx                     open('HERE/' + 'x' * 70000, 'w')
        what it swallows                    writes HERE/made                    try:\n    open('HERE/made', 'w')\nexcept BaseException:\n    pass
        a file of the user's                imports own from                    import own
        """,
        3,
    )
}


@pytest.mark.parametrize("what", FORBIDDEN)
def test_an_effect_that_only_a_worker_may_have_is_refused_before_it_happens(made, what):
    here = made.folder / "here"
    (here / "there").write_text("")
    (here / "own.py").write_text("")
    source, why = (text.replace("HERE", str(here)) for text in FORBIDDEN[what])
    said = made("import fine\nimport forbidden", fine="", holder="", forbidden=source)
    assert (said["made"], said["spoilt"]) == (1, True)
    assert why in said["why"]
    assert said["printed"] == []
    assert (here / "there").exists()
    assert {path.name for path in here.iterdir()} - {"__pycache__"} == {"there", "own.py"}


def test_a_lazy_module_is_not_executed_by_the_watch(made):
    source = (
        "import importlib.util, sys\nspec = importlib.util.find_spec('wave')\n"
        "module = importlib.util.module_from_spec(spec)\nsys.modules['wave'] = module\n"
        "importlib.util.LazyLoader(spec.loader).exec_module(module)\n"
    )
    asked = "'open' in object.__getattribute__(sys.modules['wave'], '__dict__')"
    said = made("import lazy", asked=asked, lazy=source)
    assert (said["made"], said["worker"]) == (1, False)


def test_what_was_refused_once_is_not_tried_again(made):
    packages = {"fine": "", "forbidden": "import threading\nthreading.Thread(target=print).start()"}
    first = made("import fine\nimport forbidden", **packages)
    again = made("import fine\nimport forbidden", **packages)
    assert (first["spoilt"], again["spoilt"]) == (True, False)
    assert (again["made"], again["why"]) == (1, first["why"])
    (kept,) = (made.folder / "cache").iterdir()
    assert json.loads(kept.read_text())["num_made"] == 1
    (made.folder / "site-packages" / "another").mkdir()  # something was installed
    assert made("import fine\nimport forbidden", **packages)["spoilt"]


ALLOWED = {
    "a variable": "import os\nVALUE = os.environ.get('HOME')",
    "a search": "import os\nVALUE = [k for k in ('A', 'B') if k in os.environ]",
    "a data file": "import pathlib\nVALUE = pathlib.Path(__file__).with_name('x').exists()",
    "another temporary folder": "import tempfile\nVALUE = tempfile.gettempdir()",
    "a port that is closed again": (
        "import socket\nwith socket.socket() as one:\n    one.bind(('127.0.0.1', 0))"
    ),
    "a folder that is there": "import os\nos.makedirs(os.getcwd(), exist_ok=True)",
    "an example in its documentation": (
        "import random\ndef work(): pass\nfor one in (work,):\n"
        "    one.__doc__ = f'such as {random.Random().random()}'"
    ),
    "a draw that is always the same": "import random\nfor n in (1, 2): random.Random(n).random()",
    "nothing": "open('/dev/null', 'w').close()",
    "an own generator with a seed": "import random\nGENERATOR = random.Random(7)",
    "its arguments": "import sys\nVALUE = sys.argv",
}


@pytest.mark.parametrize("what", ALLOWED)
def test_what_makes_no_difference_is_allowed(made, what):
    said = made("import allowed", allowed=ALLOWED[what])
    assert (said["made"], said["why"], said["printed"]) == (1, "", [])


def renewed(made, text, asked, **packages):
    """Return what is asked before a worker begins, and what he has then."""
    said = made(text, asked=asked, **packages)
    assert (said["made"], said["why"]) == (1, "")
    return said["before"], said["worker"]


def test_a_random_name_is_another_one_in_each_worker(made):
    source = "import uuid\nNAME = uuid.uuid4().hex\ndef name():\n    return NAME\n"
    asked = "sys.modules['drawn'].name()"
    before, worker = renewed(made, "from drawn import name", asked, drawn=source)
    assert len(worker) == 32
    assert worker != before


@pytest.mark.parametrize(
    "draw",
    ["random.Random().random()", "random.getrandbits(60)", "random.uniform(0, 1)", "random.randrange(1 << 60)",
     "secrets.token_hex()", "os.urandom(8).hex()"],
)  # fmt: skip
def test_a_number_that_is_drawn_is_another_one_in_each_worker(made, draw):
    source = f"import os, random, secrets\nDRAWN = {draw}\n"
    before, worker = renewed(made, "import drawn", "sys.modules['drawn'].DRAWN", drawn=source)
    assert worker != before


def test_a_generator_of_its_own_goes_another_way_in_each_worker(made):
    source = "import random\nGENERATOR = random.Random()\nKNOWN = random.Random(7)\n"
    asked = (
        "[sys.modules['drawn'].GENERATOR.random(), sys.modules['drawn'].KNOWN.getstate()[1][:9]]"
    )
    before, worker = renewed(made, "import drawn", asked, drawn=source)
    assert worker[0] != before[0]
    assert worker[1] == before[1]


def test_a_number_that_a_class_draws_is_another_one_in_each_worker(made):
    """As sympy's `Dummy` has it."""
    source = (
        "import random\nclass Dummy:\n    count = 0\n    generator = random.Random()\n"
        "    first = generator.randint(0, 1 << 60)\n"
    )
    asked = "sys.modules['drawn'].Dummy.first"
    before, worker = renewed(made, "from drawn import Dummy", asked, drawn=source)
    assert worker != before


def test_a_rank_that_is_kept_as_an_attribute_is_that_of_the_worker(made):
    """As Lightning's and torchmetrics' `rank_zero_only` have it."""
    source = (
        "import os\ndef only():\n    return only.rank\n"
        "only.rank = getattr(only, 'rank', int(os.environ.get('LOCAL_RANK', 0)))\n"
    )
    said = made(
        "import lit", asked="sys.modules['lit'].only()", worker={"LOCAL_RANK": "3"}, lit=source
    )
    assert (said["made"], said["why"]) == (1, "")
    assert (said["before"], said["worker"], said["differs"]) == (0, 3, None)


def test_a_variable_that_is_another_one_for_workers_is_found(made):
    source = "import os\nVALUE = os.environ.get('COLOUR')\n"
    same, other = (
        made(
            "import reader", worker={"COLOUR": colour}, environment={"COLOUR": "red"}, reader=source
        )
        for colour in ("red", "blue")
    )
    assert (same["differs"], other["differs"]) == (None, "COLOUR")


@pytest.mark.parametrize("taken", ["open", "os.open", "os.urandom", "os.mkdir"])
def test_no_module_keeps_what_stood_guard(made, taken):
    source = f"import os\ntaken = {taken}\n"
    said = made("import taker", asked=f"sys.modules['taker'].taken is {taken}", taker=source)
    assert (said["made"], said["worker"]) == (1, True)


def test_variables_of_workers_are_known():
    assert is_of_a_worker("RANK")
    assert is_of_a_worker("OMP_NUM_THREADS")
    assert not is_of_a_worker("HF_HOME")


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
            "early",
        ),
        (
            'def deps():\n    if "torch" in sys.modules:\n        # why\n        raise ImportError()\n',
            "early",
        ),
        ("if 'torch' in sys.modules:\n    import torch\n", None),
        ("if 'torch' not in sys.modules:\n    raise ImportError()\n", None),
        ("def is_torch(x):\n    return 'torch' in sys.modules\nraise SystemExit\n", None),
    ],
)
def test_a_package_that_wants_to_be_imported_before_torch_is_found(tmp_path, text, refuses):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "__init__.py").write_text("from . import deps\n")
    (tmp_path / "early" / "deps.py").write_text(text)
    names = {"early.api", "json", "torch", "nowhere"}
    assert refuses_torch(names, str(tmp_path)) == refuses
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


def customized(packages, monkeypatch, words):
    """Put words into a `sitecustomize.py` that is imported; return its path."""
    path = packages / "sitecustomize.py"
    path.write_text(f"import os\n{words}\n")
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace(__file__=str(path)))
    return str(path)


@pytest.mark.parametrize("words", ["os.environ['RANK']", 'os.getenv("LOCAL_RANK")', "SLURM_PROCID"])
def test_start_code_that_reads_a_rank_is_found(packages, monkeypatch, words):
    path = customized(packages, monkeypatch, words)
    assert start_code_with_rank() == path
    monkeypatch.setitem(sys.modules, "sitecustomize", SimpleNamespace())
    assert start_code_with_rank() is None  # a file that has not been imported


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
    customized(packages, monkeypatch, words)
    assert start_code_with_rank() is None
