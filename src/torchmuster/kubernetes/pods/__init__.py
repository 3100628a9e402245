"""The client's side of pods."""
