"""The local engine, and the facts about schedulers that need no dialect."""
