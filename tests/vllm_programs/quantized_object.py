"""Loads a model with transformers, quantised by bitsandbytes, and serves the object."""

import os

from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from vllm import LLM, SamplingParams

model_id = "facebook/opt-125m"
quantization = {
    "int8": BitsAndBytesConfig(load_in_8bit=True),
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
}[os.environ["QUANTIZATION"]]
hf_model = AutoModelForCausalLM.from_pretrained(model_id, quantization_config=quantization)
hf_tokenizer = AutoTokenizer.from_pretrained(model_id)

llm = LLM(model=hf_model, tokenizer=hf_tokenizer)
outputs = llm.generate(["The ship left the harbour at"], SamplingParams(temperature=0.0, max_tokens=8))
print("Token ids:", list(outputs[0].outputs[0].token_ids))
