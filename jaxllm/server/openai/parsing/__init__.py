"""From a model's text to thoughts, content and tool calls, as it comes in."""
