"""Models that are not what is served: each says what it is and names one nearby that is."""

import pytest

from jaxllm.checkpoint import unsupported
from jaxllm.models.registry import ARCHITECTURES

CLASSIFIER, SPEECH, ENCODER_DECODER, IMAGES, EXPERTS, LATENT, SPARSEMIXER, RECURRENT, ENCODER, HEADLESS = (
    "scores or labels",
    "speech",
    "an encoder-decoder",
    "reads images",
    "a mixture of experts",
    "multi-head latent attention (kv_lora_rank)",
    "router_jitter_noise",
    "recurrent",
    "an encoder:",
    "no head",
)
NAMES = {
    EXPERTS: "Qwen3NextForCausalLM DbrxForCausalLM Grok1ModelForCausalLM JambaForCausalLM Dots1ForCausalLM "
    "ArcticForCausalLM HunYuanMoEV1ForCausalLM BailingMoeForCausalLM GraniteMoeSharedForCausalLM dbrx qwen3_next",
    LATENT: "DeepseekV2ForCausalLM DeepseekV3ForCausalLM DeepseekV32ForCausalLM LongcatFlashForCausalLM deepseek_v3",
    SPARSEMIXER: "PhiMoEForCausalLM PhimoeForCausalLM phimoe",
    ENCODER: "BertForMaskedLM BertModel RobertaForMaskedLM XLMRobertaModel DistilBertForMaskedLM DebertaV2ForMaskedLM "
    "ModernBertForMaskedLM ElectraForPreTraining AlbertForMaskedLM MPNetForMaskedLM NomicBertModel "
    "bert roberta xlm-roberta modernbert nomic-bert",
    ENCODER_DECODER: "T5ForConditionalGeneration MT5ForConditionalGeneration UMT5ForConditionalGeneration "
    "BartForConditionalGeneration MBartForConditionalGeneration PegasusForConditionalGeneration MarianMTModel "
    "M2M100ForConditionalGeneration LEDForConditionalGeneration T5GemmaForConditionalGeneration t5 mt5 bart flan-t5",
    SPEECH: "WhisperForConditionalGeneration Wav2Vec2ForCTC HubertForCTC Qwen2AudioForConditionalGeneration "
    "SpeechT5ForTextToSpeech VoxtralForConditionalGeneration SeamlessM4TModel MusicgenForConditionalGeneration "
    "GraniteSpeechForConditionalGeneration whisper wav2vec2",
    IMAGES: "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration Qwen3VLForConditionalGeneration "
    "Qwen3VLMoeForConditionalGeneration LlavaForConditionalGeneration LlavaNextForConditionalGeneration "
    "LlavaOnevisionForConditionalGeneration MllamaForConditionalGeneration Llama4ForConditionalGeneration "
    "Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration Mistral3ForConditionalGeneration "
    "PixtralForConditionalGeneration PaliGemmaForConditionalGeneration Idefics3ForConditionalGeneration "
    "SmolVLMForConditionalGeneration InternVLChatModel InternVLForConditionalGeneration Phi3VForCausalLM MiniCPMV "
    "MiniCPMO MolmoForCausalLM Blip2ForConditionalGeneration Florence2ForConditionalGeneration DeepseekVLV2ForCausalLM "
    "Qwen2_5OmniThinkerForConditionalGeneration Kimi_K25ForConditionalGeneration Glm4vForConditionalGeneration "
    "CLIPModel SiglipModel FuyuForCausalLM AriaForConditionalGeneration qwen2_vl llava mllama gemma3 paligemma",
    CLASSIFIER: "Qwen3ForSequenceClassification LlamaForSequenceClassification BertForSequenceClassification "
    "Qwen2ForRewardModel InternLM2ForRewardModel Qwen2ForProcessRewardModel BertForTokenClassification "
    "RobertaForQuestionAnswering LlamaForTokenClassification GemmaForSequenceClassification",
    RECURRENT: "MambaForCausalLM Mamba2ForCausalLM FalconMambaForCausalLM RwkvForCausalLM RWKV5ForCausalLM "
    "RecurrentGemmaForCausalLM Zamba2ForCausalLM BambaForCausalLM FalconH1ForCausalLM NemotronHForCausalLM "
    "Lfm2ForCausalLM xLSTMForCausalLM mamba mamba2 rwkv6 falcon-h1 lfm2",
    HEADLESS: "LlamaModel Qwen2Model MistralModel GPT2Model Gemma2Model",
}
NOT_YET = (  # text models that may come: what is said is which families are supported
    "GPT2LMHeadModel GPTNeoXForCausalLM GPTJForCausalLM FalconForCausalLM BloomForCausalLM MptForCausalLM "
    "GemmaForCausalLM Gemma3nForCausalLM CohereForCausalLM OlmoForCausalLM Olmo2ForCausalLM GraniteForCausalLM "
    "StableLmForCausalLM Starcoder2ForCausalLM SmolLM3ForCausalLM NemotronForCausalLM GlmForCausalLM "
    "Ernie4_5ForCausalLM SeedOssForCausalLM InternLM3ForCausalLM MiniCPM3ForCausalLM HunYuanDenseV1ForCausalLM"
)


@pytest.mark.parametrize("what", NAMES)
def test_names_tell_what_a_model_is(what):
    said = {name: unsupported.describe([name], {}) for name in NAMES[what].split()}
    assert not {name: text for name, text in said.items() if text is None or what not in text}
    assert all(text.startswith(f"{name} ") and "/" in text for name, text in said.items())


def test_text_models_are_no_other_kind():
    supported = [name for name in ARCHITECTURES if name.endswith("ForCausalLM")]  # of others nobody asks
    said = {name: unsupported.describe([name], {}) for name in [*NOT_YET.split(), *supported]}
    assert not {name: text for name, text in said.items() if text is not None}


TASKS = {
    "MODEL_FOR_MASKED_LM": (ENCODER, ENCODER_DECODER, None),
    "MODEL_FOR_SEQUENCE_CLASSIFICATION": (CLASSIFIER,),
    "MODEL_FOR_TOKEN_CLASSIFICATION": (CLASSIFIER,),
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM": (ENCODER_DECODER, SPEECH, None),
    "MODEL_FOR_SPEECH_SEQ_2_SEQ": (SPEECH, None),
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT": (IMAGES, EXPERTS, RECURRENT, ENCODER_DECODER, None),
    "MODEL_FOR_CTC": (SPEECH,),
}


@pytest.mark.parametrize("task", TASKS)
def test_no_model_of_transformers_is_taken_for_another_kind(task):
    """None: a name that tells nothing. At most every fifth does."""
    modeling_auto = pytest.importorskip("transformers.models.auto.modeling_auto")
    names = sorted({*getattr(modeling_auto, f"{task}_MAPPING_NAMES").values()})
    said = {name: unsupported.describe([name], {}) for name in names if isinstance(name, str)}
    wrong = {
        name: text
        for name, text in said.items()
        if not any(text is None if kind is None else text and kind in text for kind in TASKS[task])
    }
    assert said and not wrong
    assert sum(text is None for text in said.values()) <= len(said) // 4


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("Qwen3NextForCausalLM", "Qwen/Qwen3-4B"),
        ("DeepseekV3ForCausalLM", "R1-Distill-Qwen"),
        ("MllamaForConditionalGeneration", "Llama-3.1-8B"),
        ("SmolVLMForConditionalGeneration", "SmolLM2"),
        ("PhiMoEForCausalLM", "Phi-4-mini"),
        ("GPT2Model", "Qwen/Qwen3-Embedding-0.6B"),
        ("NomicBertModel", "BAAI/bge-m3"),
        ("DebertaV2ForSequenceClassification", "BAAI/bge-reranker-v2-m3"),
    ],
)
def test_the_nearest_model_is_of_the_family(name, model):
    assert model in unsupported.describe([name], {}).partition(", such as ")[2]


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({"num_local_experts": 8}, EXPERTS),
        ({"n_routed_experts": 64}, EXPERTS),
        ({"n_routed_experts": 64, "kv_lora_rank": 512}, LATENT),
        ({"vision_config": {"depth": 2}}, IMAGES),
        ({"audio_config": {"depth": 2}}, SPEECH),
    ],
)
def test_keys_tell_where_names_do_not(config, what):
    assert what in unsupported.describe(["NovelForCausalLM"], config)
    assert unsupported.describe(["NovelForCausalLM"], dict.fromkeys(config)) is None
    assert unsupported.describe([], config) is None


def test_the_first_name_that_tells_decides():
    text = unsupported.describe(["NovelForCausalLM", "dbrx"], {"vision_config": {}})
    assert text.startswith("dbrx is a mixture of experts")
