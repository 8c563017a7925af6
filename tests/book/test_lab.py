"""JupyterLab: a notebook that is opened and saved without an edit stays the same file, and so does its Markdown."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("jupyter_server", reason="the contents manager needs Jupyter")

from jupyter_server.services.contents.largefilemanager import LargeFileManager
from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class
from traitlets.config import PyFileConfigLoader

ROOT = Path(__file__).resolve().parents[2]
# What JupyterLab puts there when it saves, from the running kernel.
LANGUAGE_INFO = {"name": "python", "version": "3.11.7", "file_extension": ".py", "mimetype": "text/x-python"}


@pytest.mark.filterwarnings("ignore:Overriding existing pre_save_hook")
def test_saving_without_an_edit_changes_no_file(tmp_path: Path) -> None:
    folder = next(ROOT.glob("chapters/02_*"))
    names = [f"{folder.name}.ipynb", f"{folder.name}.md"]
    for name in names:
        shutil.copy(folder / name, tmp_path)
    config = PyFileConfigLoader("jupyter_server_config.py", path=str(ROOT / "jupyter")).load_config()
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path), config=config)

    content = manager.get(names[0], content=True)["content"]
    content["metadata"]["language_info"] = LANGUAGE_INFO
    manager.save({"type": "notebook", "format": "json", "content": content}, names[0])

    assert [name for name in names if (tmp_path / name).read_bytes() != (folder / name).read_bytes()] == []
