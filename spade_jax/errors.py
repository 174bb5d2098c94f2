"""The exceptions a user can meet. Each message says what happened, the value, what was expected and
what to change.

Untrusted outcomes (a generated program that hangs, a malformed completion) are not here: they are
`types.Outcome`, data.
"""


class SpadeError(Exception):
    """Base of all errors that the CLI prints as one line with exit code 2."""

    exit_code = 2


class ConfigError(SpadeError, ValueError):
    """A setting is unknown, out of range, or contradicts another; its dotted key is named."""


class CorpusError(SpadeError):
    """The corpus is missing, unreadable or has no usable document."""


class CheckpointError(SpadeError):
    """A checkpoint or weights folder is missing, damaged, or of another run or model."""


class EndpointError(SpadeError, RuntimeError):
    """The endpoint that writes the designs answers no request."""


class SandboxError(SpadeError, RuntimeError):
    """The environment pool itself cannot run (never: a generated program misbehaved)."""


class SamplerError(SpadeError, RuntimeError):
    """A generation request cannot be served, such as one longer than the cache."""


class LostProcess(SpadeError, RuntimeError):
    """Another process of the run has failed or disappeared: nothing is wrong with this one."""

    exit_code = 3
