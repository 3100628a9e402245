"""Which dialects the contract tests run over: ours, and those of `--dialect PACKAGE.MODULE`."""

import importlib

from torchmuster.launcher.engines.registry import engine_entries, load_dialect

# Of each: the first word of its directives (None: its jobs are objects of an API, without a script), an answer with a
# state that no table has, and, where it has a form of its own, the id of the job 41.
CONTRACTS = {
    "kubernetes": {
        "directive": None,
        "unknown": '{"kind": "List", "items": [{"kind": "Job", "metadata": {"name": "41", "namespace": "ml", "uid": "u",'
        ' "labels": {"torchmuster.dev/run": "41"}}, "spec": {"completions": 2},'
        ' "status": {"conditions": [{"type": "Splendid", "status": "True"}]}}]}',
        "job": "lab/ml/{}",
    },
    "slurm": {"directive": "#SBATCH", "unknown": "squeue|1|SPLENDID|None|N/A|\n"},
    "pbs": {"directive": "#PBS", "unknown": '{"Jobs": {"1": {"job_state": "Z"}}}'},
}


def pytest_addoption(parser):
    parser.addoption(
        "--dialect",
        action="append",
        metavar="MODULE",
        help="run the contract tests over this module's DIALECT, in place of ours; its CONTRACT says two facts",
    )


def pytest_generate_tests(metafunc):
    """Give each test that asks for a dialect all of them; `contract` is what the tests know of it.

    A test that asks for `of_scripts` gets those whose jobs are shell scripts.
    """
    if not {"dialect", "of_scripts"} & set(metafunc.fixturenames):
        return
    pairs = []
    for module in metafunc.config.getoption("--dialect", default=None) or ():
        found = importlib.import_module(module)
        pairs.append((found.DIALECT, found.CONTRACT))
    pairs = pairs or [(load_dialect(name), CONTRACTS[name]) for name in engine_entries(())]
    name = "dialect"
    if "of_scripts" in metafunc.fixturenames:
        name = "of_scripts"
        pairs = [pair for pair in pairs if pair[1]["directive"] is not None]
    ids = [dialect.name for dialect, _ in pairs]
    if "contract" in metafunc.fixturenames:
        metafunc.parametrize((name, "contract"), pairs, ids=ids)
    else:
        metafunc.parametrize(name, [dialect for dialect, _ in pairs], ids=ids)
