"""A headless Chromium, driven by the part of the W3C WebDriver protocol that the tests of the page need."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.waiting import HANG_S

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs chromium and chromedriver (Debian: apt-get install chromium-driver)"
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name for a reference


class Browser:
    def __init__(self, driver_url: str, folder: Path) -> None:
        options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={folder}"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        self._driver_url = driver_url
        started = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{started['sessionId']}"

    def _send(self, method: str, path: str, body: object = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._driver_url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def _ask(self, method: str, path: str, body: object = None) -> Any:
        return self._send(method, self._session + path, body)

    def open(self, url: str) -> None:
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *values: object) -> Any:
        """Run a script in the page. Returns what it returns."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": values})

    def text(self, selector: str) -> str:
        return str(
            self.run("const one = document.querySelector(arguments[0]); return one ? one.textContent : ''", selector)
        )

    def click(self, selector: str) -> None:
        """Click an element. If the page replaces it between finding and clicking, it is found again."""
        while True:
            try:
                self._ask("POST", f"/element/{self._find(selector)}/click", {})
                return
            except AssertionError as error:
                if "stale element" not in str(error):
                    raise

    def type(self, selector: str, text: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def _find(self, selector: str) -> str:
        return str(self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT])

    def wait(self, what: str, test: Callable[[], object]) -> Any:
        """Wait until the test returns something true. Returns it."""
        until_s = time.monotonic() + HANG_S
        while not (found := test()):
            assert time.monotonic() < until_s, (
                f"{what}: not within {HANG_S} s; the page has {self.text('body')[:1500]!r}"
            )
            time.sleep(0.05)
        return found

    def look(self, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        """Set the size of the window, the colour scheme, and the number of screen pixels per CSS pixel."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", size)
        self._command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def _command(self, name: str, params: object) -> Any:
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": params})

    def complaints(self) -> list[str]:
        """Warnings and errors of the console since the last call."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self._send("DELETE", self._session)


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """A browser with a new profile in that folder. Its processes are killed at the end."""
    assert DRIVER is not None
    driver = subprocess.Popen(
        [DRIVER, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, process_group=0
    )
    try:
        assert driver.stdout is not None
        line = next((line for line in driver.stdout if "started successfully on port" in line), "")
        found = re.search(r"on port (\d+)", line)
        assert found is not None, "chromedriver did not start"
        browser = Browser(f"http://127.0.0.1:{found[1]}", folder)
        try:
            yield browser
        finally:
            browser.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(20)
        if driver.stdout is not None:
            driver.stdout.close()
