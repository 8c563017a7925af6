"""The errors that the engine raises on purpose.

Every message says what was wrong and what to change. Anything else that escapes the engine is a bug.
"""


class MiniEngineError(Exception):
    """Base of all errors below; the command line prints its message and exits with code 2."""


class RequestError(MiniEngineError, ValueError):
    """A request that cannot be served, such as an empty or too long prompt or sampling values out of range."""


class ChunkError(RequestError):
    """A chunk that cannot be registered, found or used."""


class ChunkFileError(MiniEngineError):
    """A file that is damaged, holds no chunk, or holds a chunk that another model has computed."""


class ConfigError(MiniEngineError, ValueError):
    """An engine that cannot be built as asked, such as an unknown backend or an option that the backend refuses."""


class ScheduleError(MiniEngineError):
    """A scheduler that computes nothing although requests wait, because a replaced part of it is wrong."""


class ModelLoadError(MiniEngineError):
    """A model that cannot be loaded, such as an unknown name, an unsupported architecture or wrong tensor shapes."""


class WeightFileError(ModelLoadError):
    """A weight file that is truncated, corrupted or hostile."""


class PeerError(MiniEngineError):
    """A failure of an engine that a benchmark runs in its own process, for comparison."""


class TraceFileError(MiniEngineError):
    """A file that is damaged, or is not a trace of this engine."""


def check_positive(**options: int | None) -> None:
    """Raise ConfigError unless every given option is a positive integer; None means the default."""
    for name, value in options.items():
        if isinstance(value, int) and value.bit_length() >= 64:  # numpy and torch use 64 bits, including the sign
            raise ConfigError(f"{name} is a number of {value.bit_length()} bits; choose one closer to 0")
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name} is {value!r}; it must be a whole number, 1 or more")
