"""The commands for clusters."""
