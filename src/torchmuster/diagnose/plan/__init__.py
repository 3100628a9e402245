"""Predicts the time of a training step on more nodes from measurements. Standard library only."""
