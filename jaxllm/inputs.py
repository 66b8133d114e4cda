"""vLLM's home of prompts."""

from jaxllm.text.prompts import TextPrompt as TextPrompt
from jaxllm.text.prompts import TokensPrompt as TokensPrompt
