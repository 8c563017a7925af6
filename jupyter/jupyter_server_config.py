"""JupyterLab: saving a notebook that was only opened changes no file, and no question about news covers the page."""

from pathlib import Path
from typing import Any


def keep_metadata(model: dict[str, Any], **_: object) -> None:
    """Save a notebook with the metadata that `python -m book notebooks` writes, without the kernel's own version."""
    if model["type"] == "notebook":
        metadata = model["content"]["metadata"]
        metadata["language_info"] = {"name": "python"}
        metadata.get("jupytext", {}).pop("notebook_metadata_filter", None)  # the setting below, which jupytext adds


c = get_config()  # Jupyter defines it
c.ContentsManager.pre_save_hook = keep_metadata
c.ContentsManager.notebook_metadata_filter = "jupytext.formats,kernelspec,-all"
c.LabApp.app_settings_dir = str(Path(__file__).parent)  # of overrides.json
c.LabApp.default_url = "/lab/tree/01_naive_attention/01_naive_attention.ipynb"  # the first page of the book
