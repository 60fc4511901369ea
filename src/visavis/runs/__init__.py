"""Runs: started, gone on with, opened from their folders, evaluated, and set beside published figures."""
