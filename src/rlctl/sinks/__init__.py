"""Where metrics go besides metrics.jsonl: one file a sink, each of which imports its package only when it is opened."""
