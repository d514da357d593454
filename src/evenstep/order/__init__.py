"""Which sample is read when, by whom: pure functions of a few integers."""
