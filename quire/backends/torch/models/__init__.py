"""Models of the torch backend: quire's own equations, and those of transformers."""
