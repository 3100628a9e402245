"""Stacks of a process, as Python writes them."""

SITE = "/env/lib/python3.11/site-packages"
TORCH = f"{SITE}/torch"


def stack(*frames, head="Current thread 0x00007f1c"):
    """Return the stack of one thread, its innermost frame first; each is a file, a line and a name."""
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return "\n".join([f"{head} (most recent call first):", *lines]) + "\n"
