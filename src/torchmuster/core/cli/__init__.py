"""The command group `muster`, `muster run`, and what commands share."""
