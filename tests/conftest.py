"""Check every shape and type annotation of the engine while the tests run."""

from jaxtyping import install_import_hook

install_import_hook("mini_engine", "beartype.beartype")
