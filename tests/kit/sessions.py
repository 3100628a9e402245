"""What a session was started with, of which a test gives what it is about."""

from torchmuster.multirun.server.messages import SessionSetup


def session_setup(**given):
    """Return the set-up of the session `main`, which has no limit."""
    usual = {"name": "main", "nodes": 1, "workers": None, "python": ("python3",), "preload": ()}
    usual |= {"idle_s": None, "limit_s": None, "folder": "/", "variables": ()}
    return SessionSetup(**{**usual, **given})
