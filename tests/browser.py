"""A headless Chromium and a JupyterLab for tests, driven over Chromium's own protocol.

The protocol is JSON over a web socket, and JupyterLab already brings `websocket-client`, so no
driver is installed and none has to fit the browser's version. Clicks and keys are real input
events. Nothing here knows the project's widgets.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
    "msedge",
    "microsoft-edge",
)
REMEDY = "no Chromium found: `apt-get install chromium`, or name one in the variable CHROMIUM"
OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--mute-audio",
    "--window-size=1280,1000",
    "--remote-debugging-port=0",
)
PATIENCE = float(
    os.environ.get("ALAR_PATIENCE", 280)
)  # seconds that a start or a whole notebook may take
KEYS = {
    "ArrowRight": 39,
    "ArrowLeft": 37,
    "ArrowDown": 40,
    "ArrowUp": 38,
    "Enter": 13,
    " ": 32,
    "Home": 36,
    "End": 35,
}

PANEL = (  # the first open notebook
    "[...jupyterapp.shell.widgets('main')].find(w => w.sessionContext)"
)


def find() -> str | None:
    """The browser's command, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `requests` are the addresses it asked for, `errors` what its console complained
    about."""

    def __init__(self, address: str):
        import websocket

        self.socket = websocket.create_connection(address, suppress_origin=True, timeout=PATIENCE)
        self.calls = 0
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network"):
            self.command(f"{domain}.enable")
        self.command("Emulation.setFocusEmulationEnabled", enabled=True)

    def command(self, method: str, **parameters) -> dict[str, Any]:
        self.calls += 1
        self.socket.send(json.dumps({"id": self.calls, "method": method, "params": parameters}))
        while True:
            message = json.loads(self.socket.recv())
            if message.get("id") == self.calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        details = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(
                details["exceptionDetails"].get("text", "")
                + str(details["exceptionDetails"].get("exception"))
            )

    def open(self, address: str) -> None:
        self.command("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        found = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in found:
            raise RuntimeError(
                f"{expression}: {found['exceptionDetails'].get('exception', {}).get('description')}"
            )
        return found["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE) -> Any:
        """The value of an expression once it is truthy."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(expression)):
            if time.monotonic() > end:
                raise TimeoutError(f"after {seconds:.0f} s still not true: {expression}")
            time.sleep(0.1)
        return value

    def open_notebook(self, server: str, name: str) -> None:
        """Show a notebook in JupyterLab and wait for its kernel."""
        self.open(f"{server}/lab/tree/{name}")
        self.wait(
            f"typeof jupyterapp !== 'undefined' && {PANEL}?.sessionContext?.session?.kernel?.status"
            " === 'idle'"
        )
        self.evaluate(f"jupyterapp.shell.activateById({PANEL}.id)")

    def run_all_cells(self) -> None:
        """Run the open notebook to its end, or to the first cell that fails."""
        self.evaluate("jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)")

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return self.evaluate(f"document.querySelector({selector!r}).innerText")

    def click(self, selector: str) -> None:
        x, y = self.evaluate(
            f"(() => {{const e = document.querySelector({selector!r}); e.scrollIntoView({{block:"
            " 'center'});const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y +"
            " b.height / 2]})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def press(self, selector: str, key: str) -> None:
        """Give the element the focus and press one key."""
        self.evaluate(
            f"(() => {{const e = document.querySelector({selector!r}); e.scrollIntoView({{block:"
            " 'center'}); e.focus()})()"
        )
        code = {"windowsVirtualKeyCode": KEYS[key], "key": key, "code": key}
        for kind in ("rawKeyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, **code)

    def choose(self, selector: str, index: int) -> None:
        """Take an entry of a drop-down list, as drivers do: its menu is drawn by the system,
        outside the page."""
        self.evaluate(
            f"(() => {{const e = document.querySelector({selector!r}); e.scrollIntoView({{block:"
            f" 'center'}});e.selectedIndex = {index}; for (const kind of ['input',"
            " 'change'])e.dispatchEvent(new Event(kind, {bubbles: true}))})()"
        )

    def screenshot(self, path: Path, selector: str = "") -> Path:
        """A picture of the window, scrolled to the element if one is named."""
        if selector:
            self.evaluate(
                f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            base64.b64decode(self.command("Page.captureScreenshot", format="png")["data"])
        )
        return path


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Page]:
    """A browser with a fresh profile in `folder` and one empty tab."""
    profile = folder / "profile"
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            [find(), *OPTIONS, f"--user-data-dir={profile}", "about:blank"], stdout=log, stderr=log
        )
        try:
            ready = profile / "DevToolsActivePort"
            _until(
                lambda: (
                    process.poll() is not None or (ready.exists() and ready.read_text().count("\n"))
                ),
                "the browser",
            )
            if process.poll() is not None:
                raise RuntimeError(f"{find()} ended at once; see {folder / 'chromium.log'}")
            port = ready.read_text().split()[0]
            tabs = json.loads(
                urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list", timeout=20).read()
            )
            page = Page(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))
            yield page
            with contextlib.suppress(Exception):
                page.command("Browser.close")
                process.wait(10)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def jupyterlab(folder: Path, root: Path, python_path: str) -> Iterator[str]:
    """A JupyterLab that shows the files below `root`; yields its address. Nothing of the user's own
    settings is read.

    The page offers its commands as `jupyterapp`, renders every cell at once, and asks no questions.
    """
    settings = {
        "notebook-extension/tracker": {"windowingMode": "none", "autoStartDefaultKernel": True},
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    }
    for name, values in settings.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values))
    homes = {
        "JUPYTER_CONFIG_DIR": "config",
        "JUPYTER_DATA_DIR": "data",
        "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }
    environment = {
        **os.environ,
        **{name: str(folder / home) for name, home in homes.items()},
        "PYTHONPATH": python_path,
    }
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--ip=127.0.0.1",
        f"--port={port}",
        "--ServerApp.port_retries=0",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--ServerApp.disable_check_xsrf=True",
        f"--ServerApp.root_dir={root}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly",
    ]
    with (folder / "jupyterlab.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _until(lambda: process.poll() is not None or _answers(f"{address}/api"), "JupyterLab")
            if process.poll() is not None:
                raise RuntimeError(f"JupyterLab ended at once; see {folder / 'jupyterlab.log'}")
            yield address
        finally:
            process.terminate()  # it shuts its kernels down
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def _until(condition, what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} did not start within {PATIENCE:.0f} s")
        time.sleep(0.05)
