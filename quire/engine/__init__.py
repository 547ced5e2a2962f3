"""The engine: composes a model, scheduler and backend, and runs them in this process or in a worker process."""
