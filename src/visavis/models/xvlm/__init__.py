"""X-VLM, and conversion of its checkpoints."""
