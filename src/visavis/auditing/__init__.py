"""What pictures and captions are worth: copies, captions that say little or something else, wrong pairs, and what more of them would bring."""
