"""The fields of requests for embeddings, classes, scores and rankings, with the names of OpenAI, vLLM, Jina and Cohere.
Unknown fields are ignored, as everywhere."""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from jaxllm.sampling_params import MAX_SALT_LEN
from jaxllm.server.openai.schemas import MAX_PROMPTS, MAX_TOKEN_IDS, Count, Name, TokenIds

Texts = Annotated[list[str], Meta(min_length=1, max_length=MAX_PROMPTS)]
Input = str | Annotated[list[str | int | TokenIds], Meta(min_length=1, max_length=MAX_TOKEN_IDS)]


_REFUSED = {
    "activation": "its name is use_activation",
    "normalize": "its name is use_activation",
    "messages": "conversations are not embedded; send their text as input",
    "mm_processor_kwargs": "this server takes text only",
    "instruction": "put it into the query, in the words that the model was trained with",
}


class Document(Struct, kw_only=True):
    text: str


class PoolingFields(Struct, kw_only=True):
    """The fields that all share; None: not given. Parameters have the names of `PoolingParams`."""

    REFUSED: ClassVar[dict[str, str]] = _REFUSED  # rather than ignored

    model: Name | None = None  # None: the one that is served
    use_activation: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LEN)] | None = None
    activation: Any = None
    normalize: Any = None
    mm_processor_kwargs: Any = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class EmbeddingRequest(PoolingFields, kw_only=True):
    """POST /v1/embeddings."""

    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    messages: Any = None


class PoolRequest(PoolingFields, kw_only=True):
    """POST /pooling: what the model makes of each input, as it comes."""

    input: Input
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    task: Literal["embed", "classify"] | None = None
    messages: Any = None


class ClassifyRequest(PoolingFields, kw_only=True):
    """POST /classify."""

    input: Input
    messages: Any = None


class ScoreRequest(PoolingFields, kw_only=True):
    """POST /v1/score: one text with each of the others, or each with its counterpart; by any of these names."""

    text_1: str | Texts | None = None
    text_2: str | Texts | None = None
    queries: str | Texts | None = None
    documents: str | Texts | None = None
    items: str | Texts | None = None
    data_1: str | Texts | None = None
    data_2: str | Texts | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_PROMPTS)]
    top_n: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # 0: all
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    instruction: Any = None
