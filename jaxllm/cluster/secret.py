"""The secret that the members of a group share."""

import os
from collections.abc import Mapping
from pathlib import Path

from jaxllm.errors import ClusterError

VARIABLE = "JAXLLM_CLUSTER_SECRET_FILE"
MIN_BYTES = 16
_MAX_BYTES = 4096
_HOW = "Make one (umask 077; openssl rand -hex 32 > FILE) and give every host the same"


def read_secret(path: str | Path | None, environ: Mapping[str, str] = os.environ) -> bytes:
    """What the file holds, without white space at its ends; None: the file that `VARIABLE` names. `ClusterError` if
    there is none, or it is too short to be a secret."""
    given = path or environ.get(VARIABLE)
    if not given:
        raise ClusterError(
            f"a group needs a secret, and there is none: give its file with --cluster-secret-file or {VARIABLE}. {_HOW}"
        )
    try:
        with open(given, "rb") as file:
            secret = file.read(_MAX_BYTES + 1).strip()
    except OSError as error:
        raise ClusterError(f"the group's secret can't be read: {error}. {_HOW}") from error
    if not MIN_BYTES <= len(secret) <= _MAX_BYTES:
        size = f"more than {_MAX_BYTES}" if len(secret) > _MAX_BYTES else str(len(secret))
        raise ClusterError(f"the group's secret in {given} has {size} bytes; {MIN_BYTES} are the least. {_HOW}")
    return secret
