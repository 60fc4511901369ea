"""Vector stores: LanceDB for folders and object storage, Milvus for clusters."""
