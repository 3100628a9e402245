"""Parts of a head: preflight, network survey, exec relay, metrics. Standard library only."""
