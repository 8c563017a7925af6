"""`SpeculativeConfig`: the options of speculative decoding, with vLLM's names."""

from dataclasses import dataclass, fields
from typing import Any

from mini_engine.errors import ConfigError

# The options of each method, and their defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "ngram": {"prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "suffix": {
        "suffix_decoding_max_tree_depth": 24, "suffix_decoding_max_spec_factor": 1.0, "suffix_min_length": 2,
    },
    "draft_model": {"model": None},
}  # fmt: skip


@dataclass(frozen=True)
class SpeculativeConfig:
    """How to guess the next tokens of a request.

    Attributes:
        method: "ngram": guess what followed the last time that the text had the same n tokens (prompt lookup).
            "suffix": guess what most often followed the longest suffix of the text that occurred before (suffix
            decoding).
            "draft_model": generate guesses with a small model.
        num_speculative_tokens: most guesses for each request and step. The engine makes as many as pay.
        prompt_lookup_max: largest n of "ngram"; default 4.
        prompt_lookup_min: smallest n of "ngram"; default 2.
        suffix_decoding_max_tree_depth: longest suffix that "suffix" compares with the text, in tokens; default 24.
        suffix_decoding_max_spec_factor: most guesses of "suffix" for each token of the suffix; default 1.0.
        suffix_min_length: shortest suffix that "suffix" follows, in tokens; default 2, because a single token occurs
            before many different ones, and a wrong guess costs time.
        model: name or path of the draft model of "draft_model", which has the same vocabulary.
    """

    method: str
    num_speculative_tokens: int = 4
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_min_length: int | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.method not in [*OPTIONS]:  # a list compares what cannot be hashed, too
            raise ConfigError(f"speculative_config has the method {self.method!r}; choose from {', '.join(OPTIONS)}")
        for method, names in OPTIONS.items():
            for name in names:
                if method != self.method and getattr(self, name) is not None:
                    raise ConfigError(
                        f"speculative_config: {name} is an option of the method {method!r}; leave it out for "
                        f"{self.method!r}"
                    )
        options = self.options
        for name, value in {"num_speculative_tokens": self.num_speculative_tokens, **options}.items():
            if name == "model":
                if type(value) is not str:
                    raise ConfigError(f"speculative_config: model is {value!r}; give the draft model's name or path")
            elif name == "suffix_decoding_max_spec_factor":
                if type(value) not in (int, float) or not value > 0:
                    raise ConfigError(f"speculative_config: {name} is {value!r}; give a number above 0")
            elif type(value) is not int or value < 1:
                raise ConfigError(f"speculative_config: {name} is {value!r}; give a whole number of at least 1")
        for smaller, larger in [
            ("prompt_lookup_min", "prompt_lookup_max"),
            ("suffix_min_length", "suffix_decoding_max_tree_depth"),
        ]:
            if smaller in options and options[smaller] > options[larger]:
                raise ConfigError(
                    f"speculative_config: {smaller} is {options[smaller]}, more than {larger}, {options[larger]}"
                )

    @property
    def options(self) -> dict[str, Any]:
        """The options of the method, by name, with the defaults of those that are not given."""
        given = {name: getattr(self, name) for name in OPTIONS[self.method]}
        return OPTIONS[self.method] | {name: value for name, value in given.items() if value is not None}

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
