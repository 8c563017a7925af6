"""`SpeculativeConfig`: the options of speculative decoding, with vLLM's names."""

from dataclasses import dataclass, fields
from typing import Any

from mini_engine.errors import ConfigError

METHODS = ("ngram", "draft_model")


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to guess the next tokens of a request.

    Attributes:
        method: "ngram": guess what followed the last time that the text had the same n tokens (prompt lookup).
            "draft_model": generate guesses with a small model.
        num_speculative_tokens: most guesses for each request and step.
        prompt_lookup_max: largest n.
        prompt_lookup_min: smallest n.
        model: name or path of the draft model, which has the same vocabulary.
    """

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"speculative_config has the method {self.method!r}; choose from {', '.join(METHODS)}")
        if (self.method == "draft_model") != (self.model is not None) or not isinstance(self.model, str | None):
            raise ConfigError(
                f"speculative_config: model is {str(self.model)[:40]!r}; give the name or path of a model to the "
                "method draft_model, and to no other"
            )
        numbers = {own.name: getattr(self, own.name) for own in fields(self) if own.name not in ("method", "model")}
        for name, value in numbers.items():
            if type(value) is not int or value < 1:
                raise ConfigError(f"speculative_config: {name} is {value!r}; give a whole number of at least 1")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min is {self.prompt_lookup_min}, more than prompt_lookup_max, "
                f"{self.prompt_lookup_max}"
            )

    @classmethod
    def of(cls, options: Any) -> "SpeculativeConfig":
        """Build from a mapping, as vLLM takes it.

        Raises:
            ConfigError: for unknown names and impossible values.
        """
        names = [own.name for own in fields(cls)]
        if not isinstance(options, dict) or "method" not in options:
            raise ConfigError(f'speculative_config is {options!r}; give a dictionary like {{"method": "ngram"}}')
        if unknown := set(options) - set(names):
            raise ConfigError(f"speculative_config has no {sorted(map(str, unknown))[0]!r}; it has {', '.join(names)}")
        return cls(**options)
