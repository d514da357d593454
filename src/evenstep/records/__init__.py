"""What is kept of a run: its record, its events, its curves, and what the screen shows meanwhile."""
