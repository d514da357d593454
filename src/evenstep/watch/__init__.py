"""Watching over a training while it runs, without standing in its way."""
