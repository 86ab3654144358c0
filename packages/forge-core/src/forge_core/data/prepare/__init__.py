"""Text, JSONL, Parquet, Hugging Face data and chats to shards of tokens, by any number of processes."""
