"""Byte streams beside the channel: copies of growing files, commands elsewhere, relays. Standard library only."""
