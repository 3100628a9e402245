"""What doctor, explain, lint and plan add."""

PLUGS = {
    "commands": {
        "doctor": (
            "Diagnose",
            "Check every node for problems before a job.",
            "diagnose.cli.doctor:doctor",
        ),
        "explain": (
            "Diagnose",
            "Explain from its logs why a run or another job failed.",
            "diagnose.cli.explain:explain",
        ),
        "lint": ("Diagnose", "Find mistakes in a job script.", "diagnose.cli.lint:lint"),
        "plan": ("Diagnose", "Predict a training step on more nodes.", "diagnose.cli.plan:plan"),
    },
    "ends": {"explain": "diagnose.explain.end_of_run:explained"},
    "start_checks": {"preflight": "diagnose.preflight:of_run"},
}
