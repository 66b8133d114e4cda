"""The HTTP server: OpenAI's API over an engine that runs in a process of its own, or in this one."""
