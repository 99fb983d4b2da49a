"""`--publish`: writes the figures and the executed notebooks of a finished run into the repository.

`figures/` gets what stages 07 and 08 wrote. Below it, each notebook on request that drew figures
gets a folder. `notebooks/executed/` gets one HTML page per notebook, and the report of the latent
inspector. A page needs a network only for its formulas (MathJax). Its images are reduced, and it
has no widgets, timestamps or machine paths, so publishing the same run twice changes nothing. The
search domain is published at the top, any other domain in a folder of its name. More than 5 MB of
pages are an error.
"""

import base64
import html
import io
import re
import shutil
from pathlib import Path

import nbformat

from alar.files import replacing
from alar.study.params.sections import ON_REQUEST
from alar.study.stage import RunError

LIMIT = 5 * 2**20  # bytes of HTML in all
IMAGE_WIDTH = 900  # pixels; a page's text is about as wide (60 rem)
WIDGET = "application/vnd.jupyter.widget-view+json"
TOP_DOMAIN = "search"
FIGURE_STAGES = ("07_figures", "08_latent_inspector")  # the second only together with the first
REPORT = Path("08_latent_inspector", "report.html")
FIGURE_FILES = (".png", ".svg", ".csv", ".pdf")

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<script>window.MathJax = {{tex: {{inlineMath: [["$", "$"], ["\\\\(", "\\\\)"]]}}}};</script>
<script async src="https://cdn.jsdelivr.net/npm/mathjax@3/es5/tex-svg.js"></script>
<style>
body {{ max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a;
  font: 16px/1.55 system-ui, sans-serif; }}
pre {{ background: #f6f6f4; padding: .6rem .8rem; overflow-x: auto; font-size: 13px;
  line-height: 1.4; }}
table {{ border-collapse: collapse; font-size: 14px; }}
td, th {{ padding: .2rem .6rem; border-bottom: 1px solid #ddd; }}
img, svg {{ max-width: 100%; height: auto; }} .prompt, .anchor-link {{ display: none; }}
.output_stderr pre {{ background: #fdf3ec; }}
{code_style}
</style></head><body>
{body}
</body></html>
"""


def publish(finished: list[tuple[str, Path]], root: Path) -> list[str]:
    """Publish the runs, given as (domain, run folder). Returns lines that say what went where.

    Raises RunError if the pages are too large or a run has no figures.
    """
    lines, pages = [], {}  # pages: target file → HTML
    # domain → its folder below the targets
    below = {domain: "" if domain == TOP_DOMAIN else domain for domain, _ in finished}
    for domain, run_dir in finished:
        target = root / "notebooks" / "executed" / below[domain]
        for executed in sorted((run_dir / "executed").glob("[0-9][0-9]_*.ipynb")):
            pages[target / f"{executed.stem}.html"] = to_html(executed, root)
        report = run_dir / REPORT
        if report.exists():
            pages[target / "latent_report.html"] = report.read_text(encoding="utf-8")
    # In bytes. Nothing is written before this is checked.
    total = sum(len(page.encode()) for page in pages.values())
    if total > LIMIT:
        largest = sorted(pages, key=lambda path: -len(pages[path]))[:3]  # the three to make smaller
        sizes = ", ".join(f"{path.name} {len(pages[path]) / 2**20:.1f} MB" for path in largest)
        raise RunError(
            f"the executed notebooks take {total / 2**20:.1f} MB, more than {LIMIT / 2**20:.0f} MB,"
            f" so nothing was published; show smaller figures or fewer of them in: {sizes}"
        )
    for domain, run_dir in finished:
        lines += _publish_figures(run_dir, root / "figures" / below[domain])
    for path, page in pages.items():
        with replacing(path) as aside:
            aside.write_text(page, encoding="utf-8")
    lines.append(
        f"{len(pages)} pages, {total / 2**20:.1f} MB, in {root / 'notebooks' / 'executed'}"
    )
    return lines


def to_html(executed: Path, root: Path) -> str:
    """One executed notebook as a small self-contained page."""
    from nbconvert import HTMLExporter
    from pygments.formatters import HtmlFormatter

    notebook = nbformat.read(executed, as_version=4)
    # Only what every machine shares: papermill notes times and paths here.
    notebook.metadata = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
    }
    for cell in notebook.cells:
        cell.metadata = {}  # papermill's timestamps
        for output in cell.get("outputs", []):
            _reduce(output)
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if not _is_bare_widget(output)]
    body, _ = HTMLExporter(template_name="basic").from_notebook_node(notebook)
    prose = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    heading = re.search(r"^# (.*)", "\n".join(prose), re.MULTILINE)  # the first level-1 heading
    title = heading[1] if heading else executed.stem
    run_dir = executed.parents[1]  # above the folder `executed`
    # A run folder may lie anywhere on the machine.
    body = body.replace(str(run_dir), f"runs/{run_dir.parent.name}/{run_dir.name}")
    body = body.replace(f"{root}/", "").replace(str(root), ".")  # no machine paths in a public page
    code_style = HtmlFormatter().get_style_defs(".highlight")
    return PAGE.format(title=html.escape(title), body=body, code_style=code_style)


def _publish_figures(run_dir: Path, target: Path) -> list[str]:
    """Copy the study's figures into `target`, and those of each notebook on request into a folder
    below it. Returns lines that say what went where."""
    study = [path for stage in FIGURE_STAGES for path in _figures(run_dir / stage)]
    others = {
        # A table only if there is a figure of the same name.
        stage: [path for path in _figures(run_dir / stage) if path.with_suffix(".png").exists()]
        for stage in ON_REQUEST
    }
    # folder → its files
    found = {target: study} | {target / stage: files for stage, files in others.items()}
    if not any(found.values()) or (study and not _figures(run_dir / FIGURE_STAGES[0])):
        raise RunError(
            f"{run_dir} holds no figures to publish; run stage 07 first: the same command with"
            " --from 07"
        )
    lines = []
    for folder, files in found.items():
        if not files:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        for old in _figures(folder):
            old.unlink()  # a figure that is no longer drawn must not stay
        for path in files:
            shutil.copyfile(path, folder / path.name)
        lines.append(f"{len(files)} figures and tables in {folder}")
    return lines


def _figures(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*")) if path.suffix in FIGURE_FILES]


def _reduce(output) -> None:
    """Make the images of one output smaller and drop its widget state, in place."""
    data = output.get("data", {})
    if data.pop(WIDGET, None) is not None and set(data) <= {"text/plain"}:
        data.clear()  # a widget without a static twin: its repr says nothing to a reader
    if "image/png" in data:
        data["image/png"] = _smaller(data["image/png"])
        data.pop("image/svg+xml", None)  # the same image once more, and larger


def _is_bare_widget(output) -> bool:
    return "data" in output and not output.data


def _smaller(encoded: str) -> str:
    """A base64 PNG, reduced to IMAGE_WIDTH and a palette; unchanged if that would be larger."""
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(encoded))).convert("RGB")
    if image.width > IMAGE_WIDTH:
        height = round(image.height * IMAGE_WIDTH / image.width)
        image = image.resize((IMAGE_WIDTH, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.quantize(128).save(buffer, "PNG", optimize=True)  # 128 colours are enough for plots
    smaller = base64.b64encode(buffer.getvalue()).decode()
    return smaller if len(smaller) < len(encoded) else encoded
