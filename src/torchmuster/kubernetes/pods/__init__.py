"""Runs in pods: what the client does to bring them there, and to follow them."""
