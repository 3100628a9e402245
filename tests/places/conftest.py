"""Real views and networks, as the user of the tests and, where that is root, as one without rights."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kit.command import SOURCE
from torchmuster.workflow.sandbox.place import namespaces_available

NOBODY = 65534
LIMIT_S = 180.0
STAGE = Path(__file__).with_name("stage.py")


def usable_python(prefix, user):
    """Return an interpreter that this user can start and that can import us, or None."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        code = (
            "import sys, torchmuster.workflow.sandbox.place; sys.exit(sys.version_info < (3, 11))"
        )
        try:
            ended = subprocess.run(
                [*prefix, python, "-c", code],
                cwd="/",
                env=environment(),
                capture_output=True,
                **user,
            )
        except OSError:
            continue
        if ended.returncode == 0:
            return python
    return None


def environment():
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(SOURCE), "PYTHONDONTWRITEBYTECODE": "1"}


class Stage:
    """Runs `stage.py` as one user, in a folder of /tmp that the user can write."""

    def __init__(self, prefix, python, user, base):
        self.prefix, self.python, self.user, self.base = prefix, python, user, base
        self.runs = 0

    def popen(self, tasks, **options):
        self.runs += 1
        base = os.path.join(self.base, f"run{self.runs}")
        os.mkdir(base, 0o700)
        if self.user:
            os.chown(base, NOBODY, NOBODY)
        wanted = {"base": base, "tasks": tasks, **options}
        return subprocess.Popen(
            [*self.prefix, self.python, str(STAGE), json.dumps(wanted)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd="/",
            env=environment(),
            text=True,
            **self.user,
        )

    def run(self, *tasks, **options):
        with self.popen(list(tasks), **options) as child:
            out, err = child.communicate(timeout=LIMIT_S)
        assert child.returncode == 0, err
        return json.loads(out)

    def run_one(self, **task):
        """Run the one task `a`; return what is told of it."""
        return self.run({"name": "a", **task})["tasks"]["a"]

    def run_pair(self, script, arguments, **options):
        """Run a script of Python as the tasks `a` and `b` in networks of their own, each with its words."""
        command = [self.python, "/tmp/x.py"]
        tasks = [
            {"name": n, "files": {"/tmp/x.py": script}, "command": [*command, *arguments[n]]}
            for n in "ab"
        ]
        return self.run(*tasks, network=True, **options)


@pytest.fixture(params=["as_we_are", "root_of_a_container", "user"])
def stage(request):
    prefix, user = [], {}
    if request.param != "as_we_are" and os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    if request.param == "root_of_a_container":
        if shutil.which("setpriv") is None:
            pytest.skip("no setpriv")
        prefix = ["setpriv", "--bounding-set", "-sys_admin,-net_admin"]
    if request.param == "user":
        user = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    python = usable_python(prefix, user)
    if python is None:
        pytest.skip("no interpreter that this user can start")
    reason = namespaces_available()
    if reason is not None:
        pytest.skip(reason)
    base = tempfile.mkdtemp(prefix="muster-places-", dir="/tmp")
    os.chmod(base, 0o755)
    yield Stage(prefix, python, user, base)
    shutil.rmtree(base)
