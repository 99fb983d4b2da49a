"""Notebook 08, headless and in a browser: papermill without a click, then a real JupyterLab whose
every widget is moved.

The model is small and random: it writes something else for every question, as patching needs, and
its numbers mean nothing. Pictures of what the browser showed stay in the folder named by the
variable ALAR_SCREENSHOTS, else in pytest's own; the terminal says where.
"""

import importlib.util
import os
import re
import time
from pathlib import Path

import nbformat
import pandas as pd
import pytest

from alar.inspector.interventions import KINDS
from alar.study.execution import execute
from alar.study.publish import to_html

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "08_latent_inspector.ipynb"
SIZES = {
    "questions": 4,
    "records": 2,
    "intervened": 3,
    "mapped": 2,
    "probed": 4,
    "explained": 1,
    "reported": 4,
    "bootstrap": 100,
    "rollout_max_turns": 2,
    "rollout_max_new_tokens": 24,
    "threads": 1,
    "figures_formats": ["png"],
}
TABLES = (
    "interventions.csv",
    "causal_map.csv",
    "probes.csv",
    "inspector_steps.csv",
    "inspector_words.csv",
)
FIGURES = (
    "trajectory",
    "comparison",
    "lens",
    "vectors",
    "attention",
    "interventions",
    "causal_map",
    "panel",
    "components",
    "recurrence",
)

specification = importlib.util.spec_from_file_location(
    "browser", Path(__file__).with_name("browser.py")
)
browser = importlib.util.module_from_spec(specification)
specification.loader.exec_module(browser)


@pytest.fixture(scope="module")
def checkpoints(random_model, tmp_path_factory):
    """Two models with the same base and different projectors."""
    from alar.model import save

    folder = tmp_path_factory.mktemp("checkpoints")
    return [
        str(save(*random_model(projector_residual=residual), folder / str(residual)))
        for residual in (False, True)
    ]


@pytest.fixture(scope="module")
def parameters(checkpoints):
    return SIZES | dict(zip(("checkpoint", "compare"), checkpoints))


@pytest.fixture(scope="module")
def headless(parameters, tmp_path_factory):
    """(executed notebook, stage folder) of a run as `run_all.py` does it."""
    folder = tmp_path_factory.mktemp("headless")
    executed = folder / "executed" / NOTEBOOK.name
    execute(
        NOTEBOOK,
        executed,
        parameters | {"run_dir": str(folder)},
        root=ROOT,
        threads=1,
        on_cell=lambda *_: None,
        on_progress=lambda _: None,
        on_tick=lambda: None,
    )
    return executed, folder / NOTEBOOK.stem


def test_a_headless_run_draws_every_picture_and_writes_every_table(headless):
    executed, folder = headless
    for name in FIGURES:
        assert (folder / f"inspector_{name}.png").stat().st_size > 2000, name
    for name in TABLES:
        assert (folder / name).exists(), name
    table = pd.read_csv(folder / "interventions.csv")
    assert set(table["intervention"]) == {"zero", "mean", "noise", "shuffle", "patch", "drop"}
    assert {"mean", "low", "high", "control", "control_low", "control_high"} <= set(table)
    assert (folder / "conclusions.md").read_text().count("\n- ") >= 3
    assert (folder / "report.html").read_text().count('<details class="one">') == SIZES["reported"]
    assert len(list((folder / "records").glob("*.npz"))) == SIZES["records"]
    pictures = [
        output
        for cell in nbformat.read(executed, 4).cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert len(pictures) == len(FIGURES), "each is shown once, widgets by their twin"


def test_the_published_page_carries_no_widget(headless):
    executed, _ = headless
    assert "widget-view" in executed.read_text(), "or this test shows nothing"
    page = to_html(executed, ROOT)
    for trace in ("vnd.jupyter.widget", "jupyter-widgets", "model_id", "IntSlider", "alar-panel"):
        assert trace not in page, trace
    assert page.count("data:image/png;base64") == len(FIGURES)


@pytest.fixture
def page():
    if browser.find() is None:
        pytest.skip(browser.REMEDY)
    with browser.opened() as opened:
        yield opened


@pytest.fixture
def errors(page):
    """What the page's scripts complained about, so far."""
    found = []
    page.on("pageerror", lambda error: found.append(error.message))
    return found


@pytest.fixture
def screenshots(capsys, tmp_path):
    """A folder for pictures; the terminal says where they are, also when the test passes."""
    folder = Path(os.environ.get("ALAR_SCREENSHOTS", tmp_path / "screenshots"))
    yield folder
    with capsys.disabled():
        print(f" {len(list(folder.glob('*.png')))} screenshots in {folder}")


def test_the_report_asks_for_nothing_and_runs_nothing(headless, page, errors, screenshots):
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((headless[1] / "report.html").as_uri())
    first = page.locator("details.one").first
    first.locator("> summary").click()
    assert first.evaluate("one => one.open")
    assert "•" in first.locator(".tokens").inner_text()
    page.screenshot(path=screenshots / "report.png")
    assert [address for address in asked if not address.startswith(("file:", "data:"))] == []
    assert errors == []


# What each widget is moved by: view, control, and how. Only a patch has a donor, so that one moves
# before the kind does.
MOVES = [
    ("browser", "question", "choose"),
    ("browser", "turn", "choose"),
    ("compare", "question", "choose"),
    ("compare", "one", "choose"),
    ("compare", "other", "choose"),
    ("lens", "question", "choose"),
    ("lens", "step", "ArrowRight"),
    ("lens", "layer", "ArrowLeft"),
    ("panel", "turn", "choose"),
    ("panel", "donor", "choose"),
    ("panel", "step", "choose"),
    ("panel", "kind", "choose"),
]


def test_every_widget_changes_its_view_in_jupyterlab(
    parameters, page, errors, screenshots, tmp_path
):
    root = tmp_path / "root"
    root.mkdir()
    notebook = nbformat.read(NOTEBOOK, 4)
    cell = next(cell for cell in notebook.cells if cell.metadata.get("tags") == ["parameters"])
    for name, value in (parameters | {"run_dir": str(tmp_path / "run")}).items():
        cell.source += f"\n{name} = {value!r}"
    nbformat.write(notebook, root / "n.ipynb")
    with browser.jupyterlab(tmp_path, root, str(ROOT)) as server:
        browser.open_notebook(page, server, "n.ipynb")
        browser.run_all_cells(page)
        failed = page.locator(".jp-RenderedText[data-mime-type*=stderr] .ansi-red-fg")
        assert failed.count() == 0
        page.select_option(".alar-panel-kind select", index=KINDS.index("patch"))
        page.locator(".alar-panel", has_text="donor").wait_for()
        for view, control, way in MOVES:
            place, before = f".alar-{view}-{control}", reading(page, view)
            if way == "choose":
                chosen = page.locator(f"{place} select").evaluate("list => list.selectedIndex")
                page.select_option(f"{place} select", index=0 if chosen else 1)
            else:
                page.press(f"{place} .noUi-handle", way)
            until = time.monotonic() + browser.PATIENCE / 4
            while reading(page, view) == before:
                assert time.monotonic() < until, f"{view}: moving {control} changes nothing"
                time.sleep(0.1)
            page.locator(f".alar-{view}").scroll_into_view_if_needed()
            page.screenshot(path=screenshots / f"{view}-{control}.png")
        assert errors == []


def reading(page, view: str) -> str:
    """What a view shows, without how long it took."""
    return re.sub(r"in \d+ ms", "", page.inner_text(f".alar-{view}"))
