"""What the core adds to its own plug points."""

PLUGS = {
    "commands": {
        "run": ("Run", "Run a training script on one or many nodes.", "core.cli.run:run"),
    },
    "programs": {
        "agent": "core.programs.main:main",
    },
}
