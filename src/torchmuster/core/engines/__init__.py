"""How agents are started on this machine, and which schedulers there are."""
