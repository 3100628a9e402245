"""How agents are started on hosts of ssh and in jobs of a scheduler."""
