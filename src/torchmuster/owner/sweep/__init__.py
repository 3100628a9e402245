"""A sweep: many runs of one script with other values, each a run of its own below the sweep's directory."""
