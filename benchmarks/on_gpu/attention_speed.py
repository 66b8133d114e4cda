"""The attention kernel's own speed, as in a model's layers: bytes or operations a second."""

from benchmarks import kernels
from benchmarks.on_gpu.child import Recorder
from jaxllm.pallas_kernels.dispatch import Placement
from jaxllm.pallas_kernels.paged_attention import api

MODEL = kernels.Model(32, 8, 128, 32, "bfloat16")
SMALL_MODEL = kernels.Model(4, 2, 16, 16, "float32")
DECODES = ((8, 4096), (8, 32768), (1, 1024), (1, 32768), (8, 1024), (64, 1024), (64, 4096), (256, 1024))  # batch, ctx
PROMPTS = (8192, 2048, 32768)
SMALL_DECODES, SMALL_PROMPTS = ((2, 32),), (32,)


def run(record: Recorder, small: bool) -> str:
    model = SMALL_MODEL if small else MODEL
    kernel = api.OP.preferred_at(Placement.default(), *kernels.arguments(model, [1], [model.block_size]), scale=1.0)
    record("kernel", kernel)
    decodes, prompts = {}, {}
    timing = kernels.Timing(1, 3) if small else kernels.Timing(20, 7)
    for batch, context in SMALL_DECODES if small else DECODES:
        lens = [1] * batch, [context] * batch
        taken = kernels.op_seconds(model, kernel, *lens, timing)
        moved = kernels.bytes_of_decode(model, kernel, *lens)
        decodes[f"{batch}x{context}"] = {"us": taken * 1e6, "bytes_per_s": moved / taken, "bytes": moved}
        record("decode", decodes)
    for length in SMALL_PROMPTS if small else PROMPTS:
        taken = kernels.op_seconds(model, kernel, [length], [length], timing._replace(calls=min(timing.calls, 2)))
        flops = 2 * model.heads * model.head_dim * length * (length + 1)
        prompts[length] = {"us": taken * 1e6, "flops_per_s": flops / taken}
        record("prefill", prompts)
    best = max(row["bytes_per_s"] for row in decodes.values())
    most = max(row["flops_per_s"] for row in prompts.values())
    return f"{kernel}: decodes up to {best / 1e12:.2f} TB/s, prompts up to {most / 1e12:.0f} TFLOP/s"
