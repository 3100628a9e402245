"""The commands on clusters."""
