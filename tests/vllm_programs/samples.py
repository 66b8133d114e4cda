"""Several samples of each prompt, given as token ids, with everything that ends or shapes a text."""

from vllm import LLM, SamplingParams


def main():
    llm = LLM(model="facebook/opt-125m")
    tokenizer = llm.get_tokenizer()
    prompts = [{"prompt_token_ids": tokenizer.encode(text)} for text in ("To be", "Or not")]
    sampling_params = SamplingParams(
        n=3,
        temperature=1.0,
        top_k=50,
        min_p=0.01,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        min_tokens=2,
        max_tokens=10,
        stop=["\n\n"],
        stop_token_ids=[0],
        bad_words=["zz"],
        logit_bias={5: -10.0},
        include_stop_str_in_output=True,
        skip_special_tokens=False,
    )
    for output in llm.generate(prompts, sampling_params):
        for completion in output.outputs:
            print(f"{output.prompt_token_ids} sample {completion.index}: {len(completion.token_ids)} tokens")
            assert 5 not in completion.token_ids or len(completion.token_ids) <= 10


if __name__ == "__main__":
    main()
