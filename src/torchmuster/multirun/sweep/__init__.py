"""Sweeps: members, their owner, rules that stop them."""
