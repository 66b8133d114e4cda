"""RoBERTa (arXiv 1907.11692) and XLM-RoBERTa (arXiv 1911.02116): BERT whose positions begin after the padding's id."""

from typing import Any

from jaxllm.models import bert


class Config(bert.Config):
    @classmethod
    def from_hf(cls, hf: dict, **fields: Any) -> "Config":
        padding = 1 if hf.get("pad_token_id") is None else hf["pad_token_id"]
        return super().from_hf(hf, **({"position_offset": padding + 1} | fields))


class Model(bert.Model):
    Config = Config


PREFIX = "roberta."
WEIGHTS = bert.layout(PREFIX, "classifier.dense", "classifier.out_proj")
IGNORED = r"(roberta\.)?(embeddings\.position_ids|pooler\..*)|lm_head\..*"
