"""What sessions, `muster dev` and sweeps add."""

PLUGS = {
    "commands": {
        "sweep": (
            "Run",
            "Run a script with many combinations of values.",
            "multirun.cli.sweep:sweep",
        ),
        "session": (
            "Run",
            "Hold nodes on which runs start at once.",
            "multirun.cli.session:session",
        ),
        "dev": ("Run", "Run a script again when a file of it is saved.", "multirun.cli.dev:dev"),
    },
    "programs": {
        "conduct-member": "multirun.sweep.arrays:main",
    },
    "events": {"sweep": "multirun.sweep.events"},
    "places": {"session": "multirun.cli.held:find_held"},
    "completions": {"sessions": "multirun.views.sessions:session_names"},
    "cells": {
        "sweep here": "multirun.cli.places:SweepHere",
        "sweep in-job": "multirun.cli.places:SweepInJob",
        "sweep hosts": "multirun.cli.places:SweepOnHosts",
        "sweep job": "multirun.cli.places:SweepAsArray",
        "sweep held": "multirun.cli.places:SweepInSession",
        "sweep nowhere": "multirun.cli.places:SweepNowhere",
        "session here": "multirun.cli.session:SessionHere",
        "session in-job": "multirun.cli.session:SessionInJob",
        "session hosts": "multirun.cli.session:SessionOnHosts",
        "session job": "multirun.cli.session:SessionAsJob",
        "session nowhere": "multirun.cli.session:SessionCell",
        "session pods": "multirun.cli.session:NoSessionInPods",
    },
    "agent_parts": {"remote ends": "multirun.server.streams:RemoteEnds"},
    "kinds": {
        "sweep view": "multirun.views.sweep_view:view_of_record",
        "sweep commands": "multirun.cli.sweep_record",
        "sweep restart": "multirun.cli.sweep:restart_sweep",
        "sweep own": "multirun.sweep.owner:own_sweep",
    },
    "run_owners": {"session": "multirun.background:own_in_session"},
    "fork_servers": {"warm": "multirun.server.remote:pod_fork_server"},
    "entries": {"session_server": "multirun/server/main.py"},
    "travels": {
        "multirun/api": "as launcher/api",
        "multirun/background.py": "owns runs in sessions",
        "multirun/server": "runs on each node that a session holds",
        "multirun/engine.py": "starts agents of a session's runs",
        "multirun/held.py": "the owner of a run in a session",
        "multirun/sweep": "a sweep's owner in a job or in pods",
        "multirun/views": "the calls follow sessions and sweeps",
    },
    "stops": {"arrays": "multirun.sweep.arrays:cancel_sweep"},
}
