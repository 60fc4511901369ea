"""Search service: HTTP API, web UI, authentication and limits."""
