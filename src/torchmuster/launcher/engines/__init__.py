"""Start agents on ssh hosts and in the jobs of a scheduler."""
