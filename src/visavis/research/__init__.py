"""Compare, audit and report."""
