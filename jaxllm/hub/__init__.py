"""Models by name: what users type, the hub's cache, downloads, and one small model from the Python package index."""
