"""Errata of papers and released code, one module each: every public function is one, and shows it."""
