"""Tables of votes and preferences in the database of an index."""

from __future__ import annotations

VOTE_SCHEMA = (
    """CREATE TABLE votes (
    number INTEGER PRIMARY KEY,
    timestamp TEXT NOT NULL,
    index_name TEXT NOT NULL,
    text TEXT NOT NULL,
    similar_to TEXT NOT NULL,
    image_hash TEXT NOT NULL,
    item TEXT NOT NULL,
    content_hash TEXT NOT NULL,
    relevant INTEGER,
    vote TEXT NOT NULL UNIQUE,
    undone TEXT
)""",
    "CREATE INDEX votes_by_query ON votes (text, similar_to, image_hash) WHERE undone IS NULL",
    """CREATE TABLE preferences (
    number INTEGER PRIMARY KEY,
    timestamp TEXT NOT NULL,
    text TEXT NOT NULL,
    similar_to TEXT NOT NULL,
    image_hash TEXT NOT NULL,
    left_index TEXT NOT NULL,
    right_index TEXT NOT NULL,
    preferred TEXT
)""",
)
"""Statements that make the tables. ``undone`` is the time at which a vote was undone."""
