"""Mistral's own tokenizers and prompts, which `mistral-common` brings with its reference for both."""

import json
import shutil
from pathlib import Path

import pytest

from jaxllm.convert.slow_tokenizer import write_tokenizer
from jaxllm.text.tokenizer import Tokenizer
from tests.real.hard_text import TEXTS

mistral_common = pytest.importorskip("mistral_common", reason="pip install mistral-common")

DATA = Path(mistral_common.__file__).parent / "data"
V3 = "mistral_instruct_tokenizer_240323.model.v3"
TEMPLATE = (Path(__file__).parents[1] / "chat_templates" / "mistral.jinja").read_text()
MODELS = ("tokenizer.model.v1", V3, "mistral_instruct_tokenizer_241114.model.v7")


def tokenizers(name, tmp_path_factory, *, legacy):
    """Our fast tokenizer, made of the model, and the reference. `legacy` puts a space before every text, as
    SentencePiece does; Mistral's repositories do without, as their template has the spaces."""
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("out")
    shutil.copy(DATA / name, source / "tokenizer.model")
    (source / "tokenizer_config.json").write_text(json.dumps({"legacy": legacy}))
    write_tokenizer(source, out, {"model_type": "mistral"})
    return Tokenizer.from_dir(out), MistralTokenizer.from_file(str(DATA / name))


@pytest.mark.parametrize("name", MODELS)
def test_ids_and_texts(name, tmp_path_factory):
    ours, reference = tokenizers(name, tmp_path_factory, legacy=True)
    theirs = reference.instruct_tokenizer.tokenizer
    for text in (*TEXTS, "".join(TEXTS)):
        text = text.replace("[INST]", "[inst]")  # a control token of ours wherever it stands, of theirs in chats alone
        ids = theirs.encode(text, bos=True, eos=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
        stream = ours.stream()
        assert "".join(map(stream.push, ids)) + stream.flush() == ours.decode(ids)


def test_a_chat_has_the_ids_of_the_reference(tmp_path_factory):
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    ours, reference = tokenizers(V3, tmp_path_factory, legacy=False)
    chat = [
        {"role": "user", "content": "Hi  there, 'a' \"b\" <c>\n\tKöln"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "The weather?"},
    ]
    request = ChatCompletionRequest.from_openai(chat)
    assert ours.apply_chat_template(chat, chat_template=TEMPLATE) == reference.encode_chat_completion(request).tokens
