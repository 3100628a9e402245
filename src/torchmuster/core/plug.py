"""Entries that the core adds to plug points."""

PLUGS = {
    "commands": {
        "run": ("Run", "Run a training script on one or many nodes.", "core.cli.run:run"),
    },
    "programs": {
        "agent": "core.programs.main:main",
    },
    "travels": {
        "train": "the library in the script, whose package imports torch: it has no table of its own",
        "core/cli/spelling.py": "near misses, for the calls",
        "core/engines": "owners in jobs and pods ask their scheduler",
        "core/files": "everything keeps its files by it",
        "core/head": "runs on the first node",
        "core/model": "values that all share",
        "core/net": "how nodes talk",
        "core/node": "runs on every node",
        "core/owner": "owns runs in jobs and pods",
        "core/plainfile.py": "everything reads files by it",
        "core/plugs.py": "programs and parts are found by it",
        "core/proc.py": "everything starts commands by it",
        "core/programs": "the programs that muster starts on nodes",
        "core/spec": "a task of a workflow that is a training plans it on its node",
    },
}
