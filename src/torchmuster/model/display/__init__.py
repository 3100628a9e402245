"""Text for people: what a terminal shows, and how."""
