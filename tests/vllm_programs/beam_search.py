"""The likeliest ways on from a prompt, as a beam search finds them."""

from vllm import LLM
from vllm.sampling_params import BeamSearchParams


def main():
    llm = LLM(model="facebook/opt-125m")
    tokenizer = llm.get_tokenizer()
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt": "The road goes"}, {"prompt_token_ids": tokenizer.encode("Far away")}]
    for output in llm.beam_search(prompts, params):
        best, *others = output.sequences
        assert all(sequence.cum_logprob <= best.cum_logprob for sequence in others)
        for sequence in output.sequences:
            own = [found[token].logprob for found, token in zip(sequence.logprobs, sequence.tokens[-8:], strict=True)]
            assert abs(sum(own) - sequence.cum_logprob) < 1e-3
            print(f"{sequence.cum_logprob:.2f} nats, {len(sequence.tokens)} tokens: {sequence.text!r}")


if __name__ == "__main__":
    main()
