"""Reproduction of the tables and figures of papers."""
