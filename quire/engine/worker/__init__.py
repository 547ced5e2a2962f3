"""A model in a worker process: the process itself, its client, and the protocol between them."""
