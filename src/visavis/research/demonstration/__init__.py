"""The demo: synthetic scenes, a comparison of three objectives, a search and a report."""
