"""What an owner does beyond a run on this machine."""
