"""Signals to a process and all below it."""

from torchmuster.core import proc


def signal_tree(root, signum):
    """Send a signal to a process and all below it, whatever group or session they are in."""
    for pid in [root, *proc.descendants(root)]:
        proc.kill_quietly(pid, signum)
