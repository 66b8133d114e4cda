#!/usr/bin/env bash
# lm-eval: a local task by token probabilities, and one by texts.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/data.json" <<'JSON'
[{"q": "The sky is", "a": "blue", "choices": ["blue", "a spoon"], "gold": 0},
 {"q": "Two and two are", "a": "four", "choices": ["purple elephants", "four"], "gold": 1}]
JSON
common="dataset_path: json
dataset_kwargs: {data_files: $work/data.json}
test_split: train
doc_to_text: \"{{q}}\""
cat >"$work/choices.yaml" <<YAML
task: jaxllm_choices
$common
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}]
YAML
cat >"$work/texts.yaml" <<YAML
task: jaxllm_texts
$common
output_type: generate_until
doc_to_target: "{{a}}"
generation_kwargs: {max_gen_toks: 8, until: ["\n"]}
metric_list: [{metric: exact_match}]
YAML
export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$work/cache"
arguments="model=$MODEL,base_url=$OPENAI_BASE_URL/completions,max_length=512,num_concurrent=2"
arguments="$arguments,tokenizer_backend=remote,auth_token=$OPENAI_API_KEY" # /tokenizer_info and /tokenize
lm_eval --model local-completions --model_args "$arguments" --include_path "$work" \
  --tasks jaxllm_choices,jaxllm_texts --output_path "$work/out"
grep -rhq '"acc,none": 1.0' "$work/out"
