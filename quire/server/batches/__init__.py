"""OpenAI's Files and Batches API: endpoints, storage on disk, and the service that runs batches."""
