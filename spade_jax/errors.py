"""The exceptions a user can meet. Each message says what happened, the value, what was expected and
what to change. The class carries the exit code, by which a launcher knows whether the same command
may go on later (`TransientError`) or would meet the same end again.

Untrusted outcomes (a generated program that hangs, a malformed completion) are not here: they are
`types.Outcome`, data.
"""


class SpadeError(Exception):
    """Base of all errors that the CLI prints as one line with exit code 2."""

    exit_code = 2


class TransientError(SpadeError):
    """What failed is outside of the run and may pass, such as a bucket that is out of reach or a
    full disk: the same command can go on later.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h


class ConfigError(SpadeError, ValueError):
    """A setting is unknown, out of range, or contradicts another; its dotted key is named."""


class CorpusError(SpadeError):
    """The corpus is missing, unreadable or has no usable document."""


class CheckpointError(SpadeError):
    """A checkpoint or weights folder is missing, damaged, or of another run or model."""


class StorageError(CheckpointError, TransientError):
    """A checkpoint cannot be written now, or its bucket does not answer. Those that are there are
    unharmed.
    """


class FinishedError(CheckpointError):
    """The run to go on with has come to its end."""


class EndpointError(SpadeError, RuntimeError):
    """The endpoint that writes the designs refuses the requests."""


class SilentEndpointError(EndpointError, TransientError):
    """The endpoint that writes the designs answers no request."""


class SandboxError(SpadeError, RuntimeError):
    """The environment pool itself cannot run (never: a generated program misbehaved)."""


class SandboxStartError(SandboxError, TransientError):
    """The environment pool could be there and does not come up, as on a host that is too busy."""


class SamplerError(SpadeError, RuntimeError):
    """A generation request cannot be served, such as one longer than the cache."""


class LostProcess(SpadeError, RuntimeError):
    """Another process of the run has failed or disappeared: nothing is wrong with this one."""

    exit_code = 3
