"""Words and lines for people: what a terminal shows, and how."""
