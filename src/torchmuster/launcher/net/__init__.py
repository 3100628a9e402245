"""Streams alongside the channel: copies of growing files, commands elsewhere, relays."""
