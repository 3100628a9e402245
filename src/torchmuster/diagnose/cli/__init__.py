"""muster doctor, explain, lint and plan."""
