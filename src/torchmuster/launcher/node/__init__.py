"""What agents do beyond workers: facts, probes, stacks, commands elsewhere. Standard library only."""
