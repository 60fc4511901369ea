"""What the papers need besides their objectives, registered as the parts of an installed package."""
