"""HTTP layer: the uvicorn server, event streams, the OpenAPI document and 404 hints."""
