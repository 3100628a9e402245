"""What agents do besides running workers: facts, network probes, stacks, `muster exec`."""
