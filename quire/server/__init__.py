"""The HTTP server: protocol codecs around one internal request, administration, observability and the web page."""
