"""What is imported, measured in fresh interpreters: the node side must travel, the client be quick."""

import json
import sys

import pytest

from kit.command import SOURCE, muster_env, ran

# `before` holds what a fresh interpreter has anyway; only the difference tells.
IMPORT = """
import json, sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
for name in sys.argv[2:]:
    __import__(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""
# What spawners import, then the library, which they import too.
LIBRARY = """
import json, os, sys
import torch, torch.distributed, torch.nn.parallel, torch.utils.data.distributed

class Unread(type(os.environ)):
    def __getitem__(self, name):
        raise AssertionError(f"{name} was read")

before = set(sys.modules)
os.environ.__class__ = Unread
import torchmuster.train
print(json.dumps(sorted(set(sys.modules) - before)))
"""
NODE_SIDE = [
    "torchmuster.core.programs.main",
    "torchmuster.core.node.agent",
    "torchmuster.core.head.training_head",
    "torchmuster.core.node.spawner.serve",
    "torchmuster.launcher.facts.collect",
    "torchmuster.core.files.terminal",
]


def imported_by(*names, flags=("-I", "-S")):
    done = ran([sys.executable, *flags, "-c", IMPORT, str(SOURCE), *names])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_node_side_imports_nothing_but_the_standard_library():
    packages = {name.partition(".")[0] for name in imported_by(*NODE_SIDE)}

    assert packages - sys.stdlib_module_names == {"torchmuster"}


@pytest.mark.parametrize("name", NODE_SIDE)
def test_each_module_of_the_node_side_can_be_imported_alone(name):
    assert name in imported_by(name)


def test_the_node_side_does_without_the_client():
    ours = [name for name in imported_by(*NODE_SIDE) if name.startswith("torchmuster.")]
    client = [
        f"torchmuster.{one}" for one in ("core.cli", "core.owner", "core.spec", "launcher.cli")
    ]

    assert [name for name in ours if name.startswith(tuple(client))] == []


def test_the_agent_starts_its_spawner_before_it_imports_asyncio():
    assert "asyncio" not in imported_by("torchmuster.core.programs.main")


@pytest.mark.parametrize(
    "name", ["torchmuster.core.programs.main", "torchmuster.core.node.spawner.serve"]
)
def test_what_is_not_needed_before_torch_is_imported_after_it_has_begun(name):
    later = {
        *(
            "torchmuster.core.model.events",
            "torchmuster.core.model.verdict",
            "torchmuster.core.net.messages",
        ),
        *(
            "torchmuster.core.model.progress",
            "torchmuster.workflow.plan",
            "torchmuster.launcher.model.network",
        ),
    }
    assert later & set(imported_by(name)) == set()


def test_the_library_needs_no_more_of_torch_and_reads_no_variable_before_it_is_called(tmp_path):
    pytest.importorskip("torch")
    done = ran([sys.executable, "-c", LIBRARY], env=muster_env(tmp_path))
    assert done.returncode == 0, done.stderr
    packages = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert packages - sys.stdlib_module_names == {"torchmuster"}


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["torchrun", "--help"], ["ps"]])
def test_help_and_views_import_neither_asyncio_nor_torch(words, tmp_path):
    done = ran(
        [sys.executable, "-X", "importtime", "-m", "torchmuster", *words], env=muster_env(tmp_path)
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}

    assert done.returncode == 0
    assert "torchmuster.core.cli.main" in imported
    assert (
        imported & {"asyncio", "torch", "torchmuster.core.node.agent", "rich", "pydantic"} == set()
    )
