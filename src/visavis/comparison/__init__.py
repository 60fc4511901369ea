"""Several runs beside each other."""
