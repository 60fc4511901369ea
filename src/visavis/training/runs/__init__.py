"""Run folders: their files, their records, and opening and evaluating their models."""
