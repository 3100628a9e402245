"""The batches of training: order, loading, and the proof of what was seen."""
