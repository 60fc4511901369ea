"""Crash points: each operation is stopped at each of its writes, and fails at each of them."""
