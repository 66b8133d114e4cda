"""The exceptions that users see. Each message says what happened, why, and what to do."""


class JaxLLMError(Exception):
    """Base of the errors that are neither a bad argument nor a bug."""


class ModelFormatError(JaxLLMError, ValueError):
    """A checkpoint that cannot be used: unsupported, incomplete, misshapen, truncated or hostile."""


class ModelNotFoundError(JaxLLMError, ValueError):
    """A model's name that leads to none: a typing error, no such repository, revision or file, or none in the cache."""


class ModelAccessError(JaxLLMError):
    """A model that the hub gives only to those who have accepted its licence, or are logged in."""


class DownloadError(JaxLLMError):
    """A download that did not come to its end: no network, a cut connection, a wrong size, a full disk."""


class MeshError(JaxLLMError, ValueError):
    """A mesh that does not fit the model or the machine."""


class ClusterError(JaxLLMError, ValueError):
    """A group of hosts that can't be formed: a wrong address, number, secret or model, or a host that does not come."""


class DeviceError(JaxLLMError):
    """JAX can't use the devices that it is told to: their plugin is not installed, or they are not there."""


class OutOfMemoryError(JaxLLMError):
    """The model, or its smallest KV pool, does not fit the device."""


class EngineAsleepError(JaxLLMError, ValueError):
    """A request to an engine that has given its memory away."""


class EnginePausedError(JaxLLMError):
    """A thread waits for outputs of an engine that it has paused itself."""


class EngineError(JaxLLMError):
    """Every step of what was asked for failed, or what it ran beside was stopped halfway; the cause is chained."""


class RequestEndedError(JaxLLMError):
    """A server has ended a request, whose engine may be well: it drains, or the engine has hung."""


class EngineDeadError(EngineError):
    """The engine stopped and takes no more requests; the cause is chained."""


class GroupLostError(EngineDeadError):
    """A member of the engine's group ended, hung or failed, which ends the group."""
