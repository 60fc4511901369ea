"""The demo: from drawing a captioned world to the report on what was trained on it."""
