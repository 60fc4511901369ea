"""Published matching models of videos and texts."""
