"""Predicts the time of a training step on more nodes, with the standard library only."""
