"""Runs in pods: what the first pod does to own one, and what the client does to bring it there and to follow it."""
