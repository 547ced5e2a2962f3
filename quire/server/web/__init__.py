"""The web page and the API documentation page."""
