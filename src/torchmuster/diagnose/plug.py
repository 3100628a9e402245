"""What diagnose adds to the tables: its commands, checks and files that travel."""

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
    "ends": {"explain": "diagnose.explain.own_run:explained"},
    "start_checks": {"preflight": "diagnose.preflight:of_run"},
    "travels": {
        "diagnose/doctor": "the head compares what its nodes report before a start",
        "diagnose/explain": "owners in jobs and pods read the logs of a run that failed, before the logs are gone",
        "diagnose/finding.py": "what those find",
        "diagnose/preflight.py": "a part of the head",
    },
}
