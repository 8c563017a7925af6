"""The built site, for every test that needs it: built once, since one worker runs these."""

from __future__ import annotations

import functools
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the other tests of the book run without a browser
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.book.site_under_test import build_site

    return build_site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="session")
def address(site: Path) -> Iterator[str]:
    from tests.book.site_under_test import QuietHandler

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    from tests.book.site_under_test import DESKTOP

    page = browser.new_page(viewport=DESKTOP, color_scheme="light")
    page.set_default_timeout(60_000)  # a busy machine takes its time
    yield page
    page.close()
