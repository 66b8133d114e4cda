"""Model directories that the loader does not take (pickled weights, slow tokenizers) into ones that it does.

The parent process reads JSON and copies files. Whatever parses weights or vocabularies runs in `worker.py`, a process
of its own, as such files may be hostile.
"""
