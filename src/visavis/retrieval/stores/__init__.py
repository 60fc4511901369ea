"""Vector stores: SQLite with memory-mapped arrays in a folder, Milvus for clusters."""
