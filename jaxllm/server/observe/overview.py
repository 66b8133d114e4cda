"""The server's state in a few numbers, for the page."""

from typing import TYPE_CHECKING, Any

import jaxllm

if TYPE_CHECKING:
    from jaxllm.server.server import Server


def overview(server: "Server") -> dict[str, Any]:
    """The answer of /stats. The engine's numbers are null while the model is loading."""
    info, stats, model = server.client.info, server.client.stats(), server.model
    engine = (
        None
        if info is None or stats is None
        else {
            "num_requests_running": stats.num_running,
            "num_requests_waiting": stats.num_waiting,
            "kv_cache_usage": stats.blocks_used / stats.num_blocks,
            "kv_cache_tokens": info.config.total_tokens,
            "max_model_len": info.config.max_model_len,
            "max_num_seqs": info.config.most_running,
            "num_executables": stats.num_executables,
            "num_compiled": stats.num_compiled,
        }
    )
    return {
        "model": model.name,
        "version": jaxllm.__version__,
        "is_ready": server.is_ready,
        "has_chat": model.has_chat,
        "defaults": model.defaults,
        "generation_tokens_per_s": server.metrics.rate.per_s(),
        "engine": engine,
    }
