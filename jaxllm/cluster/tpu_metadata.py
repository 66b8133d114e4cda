"""What the metadata server of Google Cloud tells a TPU VM of its slice."""

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from jaxllm.errors import ClusterError

_TIMEOUT_S = 5.0
_NUM_TRIES = 3
_PAUSE_S = 0.5
_MAX_BYTES = 1 << 20  # of an attribute: a slice of thousands of hosts has less


def on_google_cloud(environ: Mapping[str, str]) -> bool:
    """Whether this machine has a metadata server, told without a look at the network."""
    product = Path("/sys/class/dmi/id/product_name")
    return "GCE_METADATA_HOST" in environ or (product.is_file() and product.read_text().startswith("Google"))


def instance_attribute(name: str, environ: Mapping[str, str]) -> str | None:
    """
    An attribute of this VM; None if it has none of this name.

    The server is metadata.google.internal, or HOST[:PORT] in `GCE_METADATA_HOST`, as for Google's own clients; it is
    asked past any proxy. Raises `ClusterError` if it doesn't answer.
    """
    server = environ.get("GCE_METADATA_HOST") or "metadata.google.internal"
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{name}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})  # noqa: S310 - http, as above
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(_NUM_TRIES):
        if attempt:
            time.sleep(_PAUSE_S)
        try:
            with opener.open(request, timeout=_TIMEOUT_S) as answer:
                return answer.read(_MAX_BYTES).decode()
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            failure = f"it answers {error.code}"
        except OSError as error:
            failure = str(error)
    raise ClusterError(
        f"the metadata server {server} does not say {name} ({failure}); TPU VMs have it, elsewhere give "
        "--coordinator, --num-hosts and --host-index"
    )
