#!/usr/bin/env bash
# llm: a chat, a completion and a schema by its command line.
set -euo pipefail
export LLM_USER_PATH
LLM_USER_PATH=$(mktemp -d)
trap 'rm -rf "$LLM_USER_PATH"' EXIT
cat >"$LLM_USER_PATH/extra-openai-models.yaml" <<YAML
- {model_id: chat, model_name: $MODEL, api_base: "$OPENAI_BASE_URL", api_key_name: openai, supports_schema: true}
- {model_id: text, model_name: $MODEL, api_base: "$OPENAI_BASE_URL", api_key_name: openai, completion: true}
YAML
test -n "$(llm --key "$OPENAI_API_KEY" -m chat -o max_tokens 8 "Hello")"
test -n "$(llm --key "$OPENAI_API_KEY" -m chat --no-stream -o max_tokens 8 "Hello")"
test -n "$(llm --key "$OPENAI_API_KEY" -m text -o max_tokens 8 "The sea")"
llm --key "$OPENAI_API_KEY" -m chat --no-stream -o max_tokens 100 \
  --schema '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}' "Hello" | grep '"a"'
