"""Batches of training data: order, loading, and the proof of what was seen."""
