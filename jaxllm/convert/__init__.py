"""Converts model directories that the loader does not read: pickled weights, slow tokenizers.

The parent process reads JSON and copies files. Code that parses weights or vocabularies runs in a separate process,
`worker.py`, because such files may be hostile.
"""
