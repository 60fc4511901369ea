"""Compare, reproduce, diagnose, audit, probe and report."""
