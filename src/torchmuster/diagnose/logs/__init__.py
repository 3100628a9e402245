"""Reads what users give to `muster explain`: logs in any form, and job scripts; unused on nodes."""
