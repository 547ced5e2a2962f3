"""Administration endpoints: models and the prefix cache."""
