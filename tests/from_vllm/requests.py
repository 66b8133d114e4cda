"""Snippets that ask a running engine for something: prompts, sampling parameters, outputs."""

from tests.from_vllm.snippet import Snippet, refused, runs

HI = "[{'role': 'user', 'content': 'hi'}]"
USER = "ValueError"

PROMPTS: list[Snippet] = [
    runs(
        "the README's program",
        "outputs = llm.generate(['Hello, my name is'], SamplingParams(temperature=0.8, top_p=0.95))\n"
        "for output in outputs:\n    print(output.prompt, output.outputs[0].text)",
        "outputs[0].prompt == 'Hello, my name is' and isinstance(outputs[0].outputs[0].text, str)",
    ),
    runs("no parameters", "print(llm.generate('Hello')[0].outputs[0].text)", "True"),
    runs(
        "sampling_params by keyword",
        "out = llm.generate(prompts=['Hello'], sampling_params=SamplingParams(max_tokens=4, ignore_eos=True))",
        "len(out[0].outputs[0].token_ids) == 4",
    ),
    runs(
        "{'prompt_token_ids': ...}",
        "out = llm.generate([{'prompt_token_ids': [1, 2, 3]}], SamplingParams(max_tokens=4))",
        "out[0].prompt_token_ids == [1, 2, 3]",
    ),
    runs(
        "{'prompt': ...}",
        "out = llm.generate([{'prompt': 'Hi'}], SamplingParams(max_tokens=4))",
        "out[0].prompt == 'Hi'",
    ),
    runs(
        "{'prompt': ..., 'cache_salt': ...}",
        "p = SamplingParams(max_tokens=1)\nlong = 'a' * 100\n"
        "llm.generate({'prompt': long, 'cache_salt': 'a'}, p)\n"
        "same = llm.generate({'prompt': long, 'cache_salt': 'a'}, p)[0].num_cached_tokens\n"
        "other = llm.generate({'prompt': long, 'cache_salt': 'b'}, p)[0].num_cached_tokens",
        "same > 0 and other == 0",
    ),
    refused(
        "multi_modal_data",
        "llm.generate([{'prompt': 'Hi', 'multi_modal_data': {'image': None}}], SamplingParams(max_tokens=4))",
        USER,
        "only text is served: there are no images, sounds or videos yet; leave it out",
        note="vLLM refuses it too for a model of text.",
    ),
    refused(
        "prompt_token_ids= (removed from vLLM)",
        "llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=SamplingParams(max_tokens=4))",
        USER,
        "give the ids as prompts: llm.generate({'prompt_token_ids': [...]})",
    ),
    runs(
        "vllm.inputs.TokensPrompt",
        "from vllm.inputs import TokensPrompt\n"
        "out = llm.generate(TokensPrompt(prompt_token_ids=[1, 2, 3]), SamplingParams(max_tokens=2))",
        "out[0].prompt_token_ids == [1, 2, 3]",
    ),
    runs("use_tqdm=False", "out = llm.generate('a', SamplingParams(max_tokens=2), use_tqdm=False)", "len(out) == 1"),
    runs(
        "use_tqdm=tqdm",
        "from tqdm import tqdm\nmade = []\n"
        "class Mine(tqdm):\n"
        "    def __init__(self, **options):\n"
        "        made.append(self)\n"
        "        super().__init__(**options | {'disable': True})\n"
        "out = llm.generate('a', SamplingParams(max_tokens=2), use_tqdm=Mine)",
        "len(out) == len(made) == 1",
    ),
    runs(
        "lora_request=None", "out = llm.generate('a', SamplingParams(max_tokens=2), lora_request=None)", "len(out) == 1"
    ),
    refused(
        "lora_request=LoRARequest(...)",
        "from vllm.lora.request import LoRARequest\n"
        "llm.generate('a', SamplingParams(max_tokens=2), lora_request=LoRARequest('sql', 1, '/adapters/sql'))",
        "ImportError",
        "there are no LoRA adapters yet; merge the adapter into the weights",
    ),
    runs("priority", "out = llm.generate(['a'], SamplingParams(max_tokens=2), priority=[0])", "len(out) == 1"),
    runs(
        "a list of parameters",
        "out = llm.generate(['a', 'b'], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 3)])",
        "[len(o.outputs[0].token_ids) for o in out] == [2, 3]",
    ),
]

PARAMETERS: list[Snippet] = [
    runs("n=3", "out = llm.generate(['a'], SamplingParams(max_tokens=2, n=3))", "len(out[0].outputs) == 3"),
    refused(
        "temperature=3.0",
        "llm.generate('a', SamplingParams(temperature=3.0, max_tokens=2))",
        USER,
        "temperature=3.0 must be a finite number in [0, 2]",
        note="As in vLLM.",
    ),
    refused(
        "logprobs=-1",
        "llm.generate('a', SamplingParams(logprobs=-1, max_tokens=2))",
        USER,
        "logprobs=-1 must be an integer in [0, 20]",
        note="vLLM refuses it too, unless max_logprobs=-1; logprob_token_ids gives those of up to 128 tokens.",
    ),
    runs(
        "logprobs=True",
        "out = llm.generate('a', SamplingParams(logprobs=True, max_tokens=2))",
        "1 <= len(out[0].outputs[0].logprobs[0]) <= 2",
    ),
    refused(
        "logprobs=50",
        "llm.generate('a', SamplingParams(logprobs=50, max_tokens=2))",
        USER,
        "logprobs=50 must be an integer in [0, 20]",
        note="As in vLLM, by default.",
    ),
    runs(
        "prompt_logprobs=0",
        "o = llm.generate('The capital', SamplingParams(prompt_logprobs=0, max_tokens=2))[0]\nprint(o.prompt_logprobs)",
        "o.prompt_logprobs[0] is None and all(len(d) == 1 for d in o.prompt_logprobs[1:])",
    ),
    runs("top_k=-1", "out = llm.generate('a', SamplingParams(top_k=-1, max_tokens=2))", "len(out) == 1"),
    runs(
        "top_p=0",
        "out = llm.generate('a', SamplingParams(top_p=0.0, max_tokens=2))\n"
        "best = llm.generate('a', SamplingParams(temperature=0, max_tokens=2))",
        "out[0].outputs[0].token_ids == best[0].outputs[0].token_ids",
        note="vLLM refuses it. Here it keeps the most likely token, as OpenAI's API has it.",
    ),
    runs("stop as a tuple", "out = llm.generate('a', SamplingParams(stop=('x',), max_tokens=2))", "len(out) == 1"),
    refused(
        "stop=''",
        "llm.generate('a', SamplingParams(stop='', max_tokens=2))",
        USER,
        "stop='' must hold non-empty strings",
        note="As in vLLM.",
    ),
    runs(
        "a NumPy float",
        "import numpy as np\np = SamplingParams(temperature=np.float32(0.5), max_tokens=2)\nout = llm.generate('a', p)",
        "type(p.temperature) is float and p.temperature == 0.5",
    ),
    runs(
        "a NumPy integer",
        "import numpy as np\nout = llm.generate('a', SamplingParams(max_tokens=np.int64(2), ignore_eos=True))",
        "len(out[0].outputs[0].token_ids) == 2",
    ),
    runs(
        "an array of token ids",
        "import numpy as np\n"
        "out = llm.generate({'prompt_token_ids': np.array([1, 2, 3])}, SamplingParams(max_tokens=2))",
        "out[0].prompt_token_ids == [1, 2, 3]",
    ),
    runs(
        "a list of NumPy integers",
        "import numpy as np\n"
        "out = llm.generate({'prompt_token_ids': list(np.array([1, 2, 3]))}, SamplingParams(max_tokens=2))",
        "out[0].prompt_token_ids == [1, 2, 3]",
    ),
    refused(
        "max_tokens=0",
        "llm.generate('a', SamplingParams(max_tokens=0))",
        USER,
        "max_tokens=0 must be an integer in [1, 2147483647]",
        note="As in vLLM. To score a prompt: max_tokens=1, prompt_logprobs=1.",
    ),
    runs(
        "scoring a prompt",
        "out = llm.generate('a b c', SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0))",
        "len(out[0].prompt_logprobs) == len(out[0].prompt_token_ids)",
    ),
    runs(
        "seed",
        "a = [llm.generate('a', SamplingParams(seed=1, max_tokens=8))[0].outputs[0].text for _ in '12']\n"
        "print(a[0] == a[1])",
        "a[0] == a[1]",
        note="The generator is another one than vLLM's: a seed gives the same text each time, but not vLLM's.",
    ),
    refused(
        "logits_processors",
        "llm.generate('a', SamplingParams(logits_processors=[lambda ids, logits: logits], max_tokens=2))",
        USER,
        "logits are changed on the device, by logit_bias, allowed_token_ids, bad_words and structured_outputs",
    ),
    refused(
        "extra_args",
        "llm.generate('a', SamplingParams(extra_args={'a': 1}, max_tokens=2))",
        USER,
        "they are for plugins, and there are none; leave it out",
    ),
    runs(
        "truncate_prompt_tokens",
        "out = llm.generate('a b c d', SamplingParams(truncate_prompt_tokens=2, max_tokens=2))",
        "out[0].prompt_token_ids == llm.get_tokenizer().encode('a b c d')[-2:]",
    ),
    refused(
        "use_beam_search (removed from vLLM)",
        "llm.generate('a', SamplingParams(use_beam_search=True, best_of=2, temperature=0, max_tokens=2))",
        "TypeError",
        "give beam_width, or call llm.beam_search",
    ),
    runs(
        "best_of=4, n=2",
        "out = llm.generate('a', SamplingParams(best_of=4, n=2, max_tokens=2))",
        "len(out[0].outputs) == 2",
        note="Removed from vLLM: the n of best_of samples with the highest log-probability per token.",
    ),
    runs(
        "n=2, temperature=0",
        "out = llm.generate('a', SamplingParams(n=2, temperature=0, max_tokens=2))",
        "out[0].outputs[0].token_ids == out[0].outputs[1].token_ids",
        note="vLLM refuses it. Here it gives the same completion twice.",
    ),
    runs(
        "parameters are changed",
        "p = SamplingParams(max_tokens=2)\np.temperature = 0.3\np.max_tokens = 5\np.ignore_eos = True\n"
        "out = llm.generate('a', p)",
        "len(out[0].outputs[0].token_ids) == 5",
    ),
    runs("clone", "p = SamplingParams(max_tokens=2, stop=['x'])\nq = p.clone()\nq.stop.append('y')", "p.stop == ['x']"),
    refused(
        "a field by position",
        "SamplingParams(2)",
        "TypeError",
        "give each by its name: SamplingParams(n=2)",
        note="vLLM takes fields by position, in an order that changes between its versions.",
    ),
    runs(
        "from_optional",
        "p = SamplingParams.from_optional(max_tokens=4, temperature=None)",
        "(p.max_tokens, p.temperature) == (4, 1)",
    ),
    runs(
        "the default parameters are changed",
        "p = llm.get_default_sampling_params()\np.max_tokens = 4\np.ignore_eos = True\nout = llm.generate('a', p)",
        "len(out[0].outputs[0].token_ids) == 4",
    ),
    runs(
        "structured outputs: a schema",
        "from vllm.sampling_params import StructuredOutputsParams\n"
        "schema = {'type': 'object', 'properties': {'a': {'type': 'boolean'}}, 'required': ['a'], "
        "'additionalProperties': False}\n"
        "text = llm.generate('A:', SamplingParams(max_tokens=40, "
        "structured_outputs=StructuredOutputsParams(json=schema, disable_any_whitespace=True)))[0].outputs[0].text\n"
        "import json\nprint(text)",
        "json.loads(text)['a'] in (True, False)",
    ),
    runs(
        "structured outputs: a choice",
        "from vllm.sampling_params import StructuredOutputsParams\n"
        "text = llm.generate('A:', SamplingParams(max_tokens=20, "
        "structured_outputs=StructuredOutputsParams(choice=['yes', 'no'])))[0].outputs[0].text",
        "text in ('yes', 'no')",
    ),
    refused(
        "GuidedDecodingParams (removed from vLLM)",
        "from vllm.sampling_params import GuidedDecodingParams\n"
        "llm.generate('A:', SamplingParams(max_tokens=20, guided_decoding=GuidedDecodingParams(choice=['yes', 'no'])))",
        "ImportError",
        "its name in vLLM is StructuredOutputsParams now, and here",
    ),
    runs(
        "structured outputs: a pydantic model's schema",
        "from vllm.sampling_params import StructuredOutputsParams\nfrom pydantic import BaseModel\n"
        "class A(BaseModel):\n    a: bool\n"
        "params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams("
        "json=A.model_json_schema(), disable_any_whitespace=True, disable_additional_properties=True))\n"
        "text = llm.generate('A:', params)[0].outputs[0].text",
        "A.model_validate_json(text).a in (True, False)",
    ),
]

OUTPUTS: list[Snippet] = [
    runs(
        "CompletionOutput.finished()",
        "o = llm.generate('a', SamplingParams(max_tokens=2))[0]\nprint(o.outputs[0].finished())",
        "o.outputs[0].finished() is True",
    ),
    runs(
        "fields of an output",
        "o = llm.generate('a', SamplingParams(max_tokens=2, logprobs=1))[0]\n"
        "print(o.request_id, o.finished, o.metrics, o.encoder_prompt, o.encoder_prompt_token_ids, o.lora_request,\n"
        "      o.num_cached_tokens, o.prompt_logprobs, o.outputs[0].cumulative_logprob, o.outputs[0].stop_reason,\n"
        "      o.outputs[0].lora_request, o.outputs[0].routed_experts, o.kv_transfer_params)",
        "(o.encoder_prompt, o.lora_request, o.outputs[0].lora_request, o.finished) == (None, None, None, True)",
    ),
    runs(
        "metrics",
        "o = llm.generate('a', SamplingParams(max_tokens=2, ignore_eos=True))[0]\nprint(o.metrics)",
        "o.metrics.num_generation_tokens == 2 and 0 < o.metrics.queued_ts <= o.metrics.scheduled_ts "
        "<= o.metrics.first_token_ts <= o.metrics.last_token_ts and o.metrics.first_token_latency > 0",
    ),
    runs(
        "token_ids",
        "o = llm.generate('a', SamplingParams(max_tokens=2))[0]\n"
        "print(type(o.outputs[0].token_ids), o.outputs[0].token_ids[0])",
        "isinstance(o.outputs[0].token_ids, list)",
    ),
    runs(
        "Logprob",
        "o = llm.generate('a', SamplingParams(max_tokens=2, logprobs=2))[0]\n"
        "d = o.outputs[0].logprobs[0]\nx = d[o.outputs[0].token_ids[0]]\nprint(x.logprob, x.rank, x.decoded_token)",
        "x.logprob <= 0 and x.rank >= 1 and isinstance(x.decoded_token, str)",
    ),
    runs(
        "prompt_logprobs[0]",
        "o = llm.generate('a b c', SamplingParams(max_tokens=2, prompt_logprobs=2))[0]\nprint(o.prompt_logprobs[0])",
        "o.prompt_logprobs[0] is None",
    ),
    runs(
        "an output is printed",
        "text = str(llm.generate('a', SamplingParams(max_tokens=2))[0])",
        "'RequestOutput(' in text",
    ),
    runs(
        "chat",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4))\nprint(out[0].outputs[0].text)",
        "out[0].prompt.endswith('<|im_start|>assistant\\n')",
    ),
    runs(
        "chat with parts",
        "out = llm.chat([{'role': 'user', 'content': [{'type': 'text', 'text': 'hi'}]}], SamplingParams(max_tokens=4))",
        "'hi<|im_end|>' in out[0].prompt",
    ),
    runs(
        "chat with tools",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4), tools=[{{'type': 'function', 'function': "
        "{'name': 'now', 'description': 'the time', 'parameters': {'type': 'object', 'properties': {}}}}])",
        "len(out) == 1",
    ),
    runs(
        "chat with a template",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4), "
        "chat_template='{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}')",
        "out[0].prompt == 'user: hi'",
    ),
    runs(
        "chat: chat_template_content_format",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4), chat_template_content_format='string')",
        "len(out) == 1",
    ),
    runs(
        "chat: mm_processor_kwargs=None",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4), mm_processor_kwargs=None)",
        "len(out) == 1",
    ),
    runs(
        "chat: lora_request=None",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4), lora_request=None)",
        "len(out) == 1",
    ),
    runs(
        "chat: enable_thinking",
        f"out = llm.chat({HI}, SamplingParams(max_tokens=4), chat_template_kwargs={{'enable_thinking': False}})",
        "len(out) == 1",
    ),
    runs(
        "beam_search",
        "from vllm.sampling_params import BeamSearchParams\n"
        "o = llm.beam_search([{'prompt': 'The capital of France is'}], BeamSearchParams(beam_width=2, max_tokens=4))\n"
        "print(o[0].sequences[0].text)",
        "len(o[0].sequences) == 2 and o[0].sequences[0].text.startswith('The capital of France is')",
        note="Scores follow transformers: vLLM divides by the length of prompt and output.",
    ),
    runs(
        "beam_search with strings",
        "from vllm.sampling_params import BeamSearchParams\n"
        "o = llm.beam_search(['The capital of France is'], BeamSearchParams(beam_width=2, max_tokens=4))",
        "len(o[0].sequences) == 2",
    ),
    refused(
        "beam_search with a temperature",
        "from vllm.sampling_params import BeamSearchParams\n"
        "llm.beam_search([{'prompt': 'The'}], BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5))",
        USER,
        "temperature=0.5 has no effect, as beam search draws nothing at random; leave it out",
    ),
]
