"""Published matching models of images and texts."""
