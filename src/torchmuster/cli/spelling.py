"""What somebody meant who typed an option that does not exist."""

import difflib
from collections.abc import Sequence

# torchrun's word for it, and what `muster run` calls it; None: it is not needed.
TORCHRUN_OPTIONS: dict[str, str | None] = {
    "--nnodes": "--nodes",
    "--max-restarts": "--max-restarts",
    "--nproc-per-node": "--nproc-per-node",
    "--module": "-m",
    "--start-method": None,
    "--tee": "--tee",
    "--duplicate-stderr-filters": None,
    "--duplicate-stdout-filters": None,
    "--event-log-handler": None,
    "--log-dir": None,
    "--local-addr": None,
    "--local-ranks-filter": "--tee",
    "--logs-specs": None,
    "--master-addr": None,
    "--master-port": None,
    "--monitor-interval": None,
    "--no-python": None,
    "--node-rank": None,
    "--numa-binding": None,
    "--rdzv-backend": None,
    "--rdzv-conf": None,
    "--rdzv-endpoint": None,
    "--rdzv-id": None,
    "--redirects": None,
    "--role": None,
    "--run-path": None,
    "--shutdown-timeout": "--grace",
    "--signals-to-handle": None,
    "--standalone": None,
    "--virtual-local-rank": None,
}


# What others call it, and what `muster run` calls it.
_OTHER_WORDS = {
    "--job-name": "--name NAME",
    "-J": "--name NAME",
}


def hint_for_option(given: str, known: Sequence[str]) -> str | None:
    """Return how to mend an unknown option; None when nothing is near."""
    if given in _OTHER_WORDS:
        return f"here it is `{_OTHER_WORDS[given]}`"
    dashed = "--" + given.lstrip("-").replace("_", "-")
    if dashed in known:
        return f"it is spelled `{dashed}`"
    if dashed in TORCHRUN_OPTIONS:
        ours = TORCHRUN_OPTIONS[dashed]
        theirs = "this is an option of torchrun"
        if ours is None:
            return (
                f"{theirs} that `muster run` does without: leave it out, or use `muster torchrun`"
            )
        return f"{theirs}: here it is `{ours}`, or use `muster torchrun` with torchrun's own line"
    # Without the dashes: they are all that `--on` and `--foo` have in common.
    near = difflib.get_close_matches(dashed[2:], [name[2:] for name in known], n=1)
    return f"did you mean `--{near[0]}`?" if near else None
