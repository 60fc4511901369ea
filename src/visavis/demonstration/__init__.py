"""The drawn world, from its start to its report."""
