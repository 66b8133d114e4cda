"""Llama (arXiv 2302.13971, 2407.21783): pre-norm decoder, grouped-query attention, gated SiLU MLP."""

from jaxllm.models import transformer
from jaxllm.models.weights import LLAMA_LAYOUT


class Config(transformer.Config):
    REFUSED = ("attention_bias", "mlp_bias")


class Model(transformer.Decoder):
    Config = Config


WEIGHTS = LLAMA_LAYOUT
