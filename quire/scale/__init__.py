"""Several replicas of a model behind one server, on Ray Serve."""
