"""The commands for workflows, datasets and files at URLs."""
