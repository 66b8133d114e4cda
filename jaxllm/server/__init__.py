"""The HTTP server: OpenAI's API over an engine in a separate process or in this one."""
