"""Modules without tests are imported once, and not for doctests under another name."""

collect_ignore_glob = ["[!t]*.py", "table.py"]
