"""Collects facts about a node; runs on nodes. Standard library only."""
