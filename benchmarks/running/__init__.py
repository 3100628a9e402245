"""What every benchmark runs in: a world of its own, a limit, and the facts that its tables begin with."""
