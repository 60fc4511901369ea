"""Comparisons of several runs: tables of results, and the coherence of their ranked lists."""
