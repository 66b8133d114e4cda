"""Environment variables of commands: API keys, and those of vLLM."""

import logging
import os
import re
from collections.abc import Sequence

KEY_VARIABLES = ("JAXLLM_API_KEY", "VLLM_API_KEY")
ADMIN_KEY_VARIABLE = "JAXLLM_ADMIN_API_KEY"
LEVEL_VARIABLES = ("JAXLLM_LOGGING_LEVEL", "VLLM_LOGGING_LEVEL")  # the first that is set
_NO_STATISTICS = ("VLLM_NO_USAGE_STATS", "VLLM_DO_NOT_TRACK")  # what they ask for is so: nothing is sent anywhere
KEEP_ALIVE_VARIABLE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
USED = frozenset({*KEY_VARIABLES, *LEVEL_VARIABLES, *_NO_STATISTICS, KEEP_ALIVE_VARIABLE})
COUNTERPARTS = {
    "VLLM_CACHE_ROOT": "set JAX_COMPILATION_CACHE_DIR, or XDG_CACHE_HOME",
    "VLLM_ASSETS_CACHE": "set HF_HUB_CACHE, or give --download-dir",
    "VLLM_TARGET_DEVICE": "set JAX_PLATFORMS to cpu, cuda or tpu",
    "VLLM_CPU_KVCACHE_SPACE": "give --num-blocks",
    "VLLM_ENGINE_ITERATION_TIMEOUT_S": "a server notices a hung engine by itself, and /health says so",
    "VLLM_LOGGING_CONFIG_PATH": "give --uvicorn-log-level, or set VLLM_LOGGING_LEVEL",
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "set the rope scaling in the model's config.json",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "there are no LoRA adapters yet",
    "VLLM_USE_MODELSCOPE": "set HF_ENDPOINT, or give a directory",
    "VLLM_TORCH_PROFILER_DIR": "see jax.profiler",
    "VLLM_SERVER_DEV_MODE": "give --enable-admin",
    "VLLM_BATCH_INVARIANT": "give --batch-invariant",
}
# Of a service that is called vllm: Kubernetes sets these in every container beside it.
_KUBERNETES = re.compile(r"VLLM_(SERVICE_(HOST|PORT)(_\w+)?|PORT(_\d+_(TCP|UDP)(_\w+)?)?)")


def api_keys(given: Sequence[str] | None) -> tuple[str, ...]:
    """The keys of a server: the given ones, else the environment's. Raises `ValueError` for an empty variable, which
    would leave a server open that somebody meant to close, and for two that differ."""
    if given:
        return tuple(given)
    found = {name: os.environ[name] for name in KEY_VARIABLES if name in os.environ}
    for name, key in found.items():
        if not key.strip():
            raise ValueError(
                f"{name} is empty, which would leave the server open to everyone; give it a key or unset it"
            )
    if len(set(found.values())) > 1:
        raise ValueError(f"{' and '.join(found)} are both set, and differ; unset one, or give --api-key")
    return tuple(dict.fromkeys(found.values()))


def admin_api_key(is_enabled: bool, given: str | None) -> str | None:
    """The key of the admin routes; None where they are not wanted. Raises `ValueError` for one without the other."""
    key = given if given is not None else os.environ.get(ADMIN_KEY_VARIABLE)
    if is_enabled and not key:
        raise ValueError(f"--enable-admin needs a key of its own: give --admin-api-key, or set {ADMIN_KEY_VARIABLE}")
    if given is not None and not is_enabled:
        raise ValueError("--admin-api-key is for the routes of --enable-admin; give both, or none")
    return key if is_enabled else None


def keep_alive_timeout_s(given: int | None) -> int:
    """Seconds that an idle connection stays open: the given ones, else the environment's, else 5. Raises `ValueError`
    for a variable that is no whole number."""
    if given is not None:
        return given
    text = os.environ.get(KEEP_ALIVE_VARIABLE, "5")
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{KEEP_ALIVE_VARIABLE}={text!r:.50} must be a whole number of seconds") from None


def logging_level() -> int:
    """INFO, or what the environment says. Raises `ValueError` for a level that does not exist."""
    variable = next((name for name in LEVEL_VARIABLES if name in os.environ), None)
    name = "INFO" if variable is None else os.environ[variable]
    level = logging.getLevelNamesMapping().get(name.upper())
    if level is None:
        raise ValueError(f"{variable}={name!r} must be DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return level


def unused_note() -> str | None:
    """One line about the variables of vLLM that are set and change nothing; None if there are none."""
    names = sorted(name for name in os.environ if name.startswith("VLLM_") and name not in USED)
    unused = [
        f"{name} ({COUNTERPARTS.get(name, 'has no meaning here')})" for name in names if not _KUBERNETES.fullmatch(name)
    ]
    return f"note: these variables are vLLM's, and not used: {', '.join(unused)}" if unused else None
