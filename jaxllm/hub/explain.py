"""What went wrong on the way to the hub, as an error that says what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from jaxllm.errors import DownloadError, JaxLLMError, ModelAccessError, ModelNotFoundError
from jaxllm.hub.names import HubName

_HTTPError: type[Exception] = HfHubHTTPError.__bases__[0]  # of httpx, or of httpx2 in later releases
_AGAIN = "run the same command again: files that are complete are not fetched again"


class HubUnreachable(DownloadError):
    """Nobody answered, or nobody who could."""


@contextmanager
def explained(name: HubName) -> Iterator[None]:
    """Turns what huggingface_hub raises into one of `jaxllm.errors`."""
    try:
        yield
    except JaxLLMError:
        raise
    except (_HTTPError, OSError, HFValidationError, RuntimeError) as error:  # RuntimeError: that of hf_xet
        raise _explain(error, name) from error


def _explain(error: Exception, name: HubName) -> Exception:
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, (_HTTPError, OSError)):
        return _explain(error.__cause__, name)
    if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError, too
        return ModelAccessError(
            f"{name.repo} is gated: accept its licence at {constants.ENDPOINT}/{name.repo}, then log in with "
            "`hf auth login`, or set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFoundError(
            f"{name.repo} has no revision {name.revision!r}; its branches and tags are at "
            f"{constants.ENDPOINT}/{name.repo}/tree/main"
        )
    if isinstance(error, RepositoryNotFoundError):
        return ModelNotFoundError(
            f"there is no directory {name.repo} here, and {constants.ENDPOINT} shows no repository of that name. Check "
            "its spelling; if it is private, log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RemoteEntryNotFoundError):
        return DownloadError(f"{name.repo} lacks a file that it lists ({error}); it may be changing: try again")
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error.response.status_code, name)
    if isinstance(error, HFValidationError):
        return ModelNotFoundError(f"{name} is no name of the hub: {error}")
    if isinstance(error, FileMetadataError):
        return DownloadError(
            f"{constants.ENDPOINT} does not answer as a hub does ({error}); check HF_ENDPOINT and proxies"
        )
    return _explain_connection(error, name)


def _explain_status(status: int, name: HubName) -> Exception:
    if status in (401, 403):
        return ModelAccessError(
            f"the hub refuses {name.repo} (HTTP {status}): if HF_TOKEN is set, or `hf auth login` was run, the token "
            "may be wrong, expired, or not made for this repository"
        )
    answer = f"{constants.ENDPOINT} answers HTTP {status} for {name.repo}"
    if status >= 500 or status == 429:  # too many requests
        return HubUnreachable(f"{answer}; wait a little, then {_AGAIN}")
    return DownloadError(f"{answer}, as no hub does; check HF_ENDPOINT and proxies")


def _explain_connection(error: Exception, name: HubName) -> Exception:
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return DownloadError(f"the disk became full while {name} was fetched; free some, or give --download-dir")
    if "Consistency check failed" in str(error):
        return DownloadError(f"a file of {name} came with a wrong size and was dropped; {_AGAIN}")
    if type(error).__name__ == "XetAuthenticationError":  # a PermissionError, too
        return _explain_status(403, name)
    if isinstance(error, PermissionError | NotADirectoryError | FileExistsError):
        return DownloadError(f"{name} can't be stored ({error}); give a directory of your own with --download-dir")
    if _is_unreachable(error):
        return HubUnreachable(
            f"{constants.ENDPOINT}, for {name}, can't be reached ({type(error).__name__}: {error}). Check the network, "
            f"proxies and HF_ENDPOINT, then {_AGAIN}"
        )
    return DownloadError(f"the connection was cut while {name} was fetched ({type(error).__name__}: {error}); {_AGAIN}")


def _is_unreachable(error: Exception) -> bool:
    """Whether nobody answered. The HTTP library's own classes differ between releases of huggingface_hub."""
    names = {cls.__name__ for cls in type(error).__mro__}
    return bool(names & {"ConnectError", "TimeoutException", "ProxyError"}) or isinstance(error, OfflineModeIsEnabled)


def not_cached(name: HubName, cache: Path, revisions: list[str]) -> ModelNotFoundError:
    """For a name that offline mode can't give."""
    there = f"Of {name.repo} it has {', '.join(revisions)}" if revisions else f"It has nothing of {name.repo}"
    return ModelNotFoundError(
        f"HF_HUB_OFFLINE is set, and {name} is not complete in {cache}. {there}. Unset HF_HUB_OFFLINE and run "
        f"`jaxllm models pull {name}`, or give a revision that is there"
    )
