"""A headless Chromium, driven by Playwright, and a JupyterLab to show in it.

Playwright drives the Chromium that is installed and downloads none. Nothing here knows the
project's widgets.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
REMEDY = "no Chromium found: `apt-get install chromium`, or name one in the variable CHROMIUM"
PATIENCE = float(os.environ.get("ALAR_PATIENCE", 280))  # seconds: a start, or a whole notebook
NOTEBOOK = "[...jupyterapp.shell.widgets('main')].find(w => w.sessionContext)"  # the open one


def find() -> str | None:
    """The browser's command, or None."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def opened() -> Iterator:
    """One empty tab, a `playwright.sync_api.Page`, of a browser with a fresh profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(1000 * PATIENCE)  # ms
        yield page
        browser.close()


def open_notebook(page, server: str, name: str) -> None:
    """Show a notebook in JupyterLab and wait for its kernel."""
    page.goto(f"{server}/lab/tree/{name}")
    page.wait_for_function(
        "typeof jupyterapp !== 'undefined'"
        f" && {NOTEBOOK}?.sessionContext?.session?.kernel?.status === 'idle'"
    )
    page.evaluate(f"jupyterapp.shell.activateById({NOTEBOOK}.id)")


def run_all_cells(page) -> None:
    """Run the open notebook to its end, or to the first cell that fails."""
    page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells').then(() => true)")


@contextlib.contextmanager
def jupyterlab(folder: Path, root: Path, python_path: str) -> Iterator[str]:
    """A JupyterLab that shows the files below `root`; yields its address.

    Nothing of the user's own settings is read. The page offers its commands as `jupyterapp`,
    renders every cell at once, and asks no questions.
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
    environment = os.environ | {name: str(folder / home) for name, home in homes.items()}
    environment["PYTHONPATH"] = python_path
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [
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
    command = [sys.executable, "-m", "jupyterlab", *options]
    with (folder / "jupyterlab.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=root, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(address, process)
            yield address
        finally:
            process.terminate()  # it shuts its kernels down
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
            process.wait()


def _wait_for(address: str, process: subprocess.Popen) -> None:
    """Until the server answers; RuntimeError if it ends, TimeoutError if it takes too long."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError("JupyterLab ended at once; see jupyterlab.log in the test's folder")
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{address}/api", timeout=5).close()
            return
        time.sleep(0.05)
    raise TimeoutError(f"JupyterLab did not start within {PATIENCE:.0f} s")
