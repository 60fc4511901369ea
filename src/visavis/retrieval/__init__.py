"""Index and search: index folders, vector stores, exact and approximate search, calibration."""
