"""Benchmark workloads are the same ids everywhere."""

import hashlib
import json

import pytest

from jaxllm.bench import workload

# sha256 of [[ids, max_tokens, n], ...] as JSON, with ids below 8000: what other engines were measured with.
DIGESTS = {
    ("batch1", 0, 1.0): "4c9c2b3731fa42291fa8c72070e7b3919c3b36c64f395a1adacc086e750006f6",
    ("batch1", 1, 1.0): "c4fa49727e6065c90f6cfb53e8b334a52327155cf4e0849bc9b9e1e2cc12b879",
    ("batch1", 0, 0.25): "4c9c2b3731fa42291fa8c72070e7b3919c3b36c64f395a1adacc086e750006f6",
    ("mixed", 0, 1.0): "7eeb420699350067df2b44a1f5531f1f7add9230e10f50b664e51fbe9f5decbe",
    ("mixed", 1, 1.0): "2f6e21e81293d05f0b9bede93bc323cd2a30732f9e33ced080e78cc75cdbae77",
    ("mixed", 0, 0.25): "b0f08617d682abe3bc4e129c20458e026a601d703f7860b874369be378060b47",
    ("decode", 0, 1.0): "c4fa99ecdcf1754a51e1983641b5e8f6117542d344e94ebf6e37eee22f168e28",
    ("decode", 1, 1.0): "bfb2188f445b0bcb2b9e87b4305b046129b31d9526267506fbf3605621958884",
    ("decode", 0, 0.25): "7bb5279ab190b66ad8c0e9a52745d9c4fdbccbd7f000299c662750ee54fc3e46",
    ("prefill", 0, 1.0): "a04b3a457952c0082145c55d58ccba8c9e2db11574d86c20059105a4026465cb",
    ("prefill", 1, 1.0): "32b26d9a68ded04994a4c2983dd44fbf27b3f152f4609d94124a9547510864e1",
    ("prefill", 0, 0.25): "2e8b26c51006d964a3a4ee1b3888f7c1ad608975e19be354e33c0e1d3bdfba70",
    ("prefix", 0, 1.0): "8ba4231f5cccc2dfc89afcd4d4af71b4be33b8800d84fa8f5d4bdd22cb9c6300",
    ("prefix", 1, 1.0): "2d8e5b500551ca6ea31649016622e8fd792a82c3aede51f2ce18226df28a1ec0",
    ("prefix", 0, 0.25): "2817b806a0148bdc07d92b78b799419c4a00aff4346f76d7adc5fe6af0f1f197",
    ("ragged", 0, 1.0): "f46a2fffdfe0a00f97c44849f4d3137f5a3af21ff6ff74ed45ca89292eae2c23",
    ("ragged", 1, 1.0): "61c35ad1436fa4ddca9d9e532739265034a8d7a699f5c473f2f662e441ecf968",
    ("ragged", 0, 0.25): "ee405e7359815294d4ea9429f505a33cc7aa0f48dfd31263528970700f98a593",
    ("n3", 0, 1.0): "9c051bfc6f0a2bb44ca43b5ff71dfea244ad3a1f176a5b84c9b058fc465aa9a8",
    ("n3", 1, 1.0): "0f078b814af9ce3efd4677a8b1e8d86428a73f686ede6fdc1eabc2aef11656fb",
    ("n3", 0, 0.25): "07636f35f4c08bcea74bd34219953d2d8b863417d891db7b47a45164117b5f06",
    ("beam4", 0, 1.0): "ae792bbc1c101df5eddf3ed26e264143935b1f96857ed130442141c02c35b980",
    ("beam4", 1, 1.0): "1bba133cef921130440673793deedd4bafa747199fb628d7bda7dba29e54f62c",
    ("beam4", 0, 0.25): "4b58ea719d53b0b920e47539840fcddf2b6cfdc3d5ad672aa587092346646922",
}


@pytest.mark.parametrize("key", DIGESTS)
def test_workloads_are_those_that_other_engines_ran(key):
    kind, seed, scale = key
    items = [list(item)[:3] for item in workload.make(kind, seed=seed, scale=scale)]
    assert hashlib.sha256(json.dumps(items).encode()).hexdigest() == DIGESTS[key]


def test_every_kind_has_a_digest():
    assert {kind for kind, _, _ in DIGESTS} == set(workload.KINDS) - {"n3apart"}


def test_requests_apart_are_those_together():
    together, apart = (workload.make(kind, scale=0.25) for kind in ("n3", "n3apart"))
    assert [item[:2] for item in apart] == [item[:2] for item in together for _ in range(3)]
    assert all(item.n == 1 and item.is_apart for item in apart)


def test_beams_are_searched():
    assert {item.beam_width for item in workload.make("beam4")} == {4}


def test_ids_are_in_the_vocabulary():
    ids = {i for kind in workload.KINDS for item in workload.make(kind, vocab=40) for i in item.prompt_token_ids}
    assert ids == set(range(10, 40))
    assert {i for prompt in workload.prompts(9, 99, vocab=12, seed=0) for i in prompt} == {10, 11}


def test_prompts_depend_on_the_seed():
    one, again, other = (workload.prompts(2, 8, vocab=99, seed=seed) for seed in (0, 0, 1))
    assert one == again != other
    assert [len(prompt) for prompt in one] == [8, 8]
