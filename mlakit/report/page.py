"""Offline HTML: one self-contained page from a notebook, or from a body of our own."""

from __future__ import annotations

import html
from functools import cache
from pathlib import Path

from mlakit.report import show
from mlakit.report.runbook import NotebookRun

TEMPLATES = Path(__file__).parent / "templates"


def page(title: str, body: str, footer: str) -> str:
    """A whole page: no reference to anything outside itself, readable without scripts."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, undefined=jinja2.StrictUndefined
    )
    from markupsafe import Markup

    return environment.get_template("page.html.j2").render(
        title=title, body=Markup(body), footer=footer, highlight_css=Markup(_highlight_css())
    )


@cache
def _highlight_css() -> str:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="friendly_grayscale").get_style_defs(".highlight")
    # One palette cannot serve both schemes with enough contrast.
    dark = "@media (prefers-color-scheme: dark) { .highlight * { color: inherit !important; } }"
    return light + dark


def notebook_page(path: Path, run: NotebookRun, footer: str) -> str:
    """The page of an executed (or half-executed) notebook, its error and parameters on top."""
    title = f"{run.name} · {run.parameters.get('arch', '')}".rstrip(" ·")
    head = [f'<p><a href="index.html">all pages of this report</a></p>{_status_line(run)}']
    if path.exists() and run.notebook:
        import nbformat
        from nbconvert import HTMLExporter
        from traitlets.config import Config

        exporter = HTMLExporter(
            template_name="notebook", extra_template_basedirs=[str(TEMPLATES)], config=Config()
        )
        exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
        exporter.exclude_anchor_links = True
        nb = nbformat.read(path, as_version=4)
        # papermill's banner cells link by anchors that this template does not write.
        nb.cells = [
            c for c in nb.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])
        ]
        body, _ = exporter.from_notebook_node(nb)
    else:
        body = f"<h1>{html.escape(title)}</h1><p>Nothing was saved: it never started.</p>"
    return page(title, "".join(head) + body, footer)


def _status_line(run: NotebookRun) -> str:
    given = ", ".join(f"{k}={v!r}" for k, v in run.parameters.items())
    if run.status == "ok":
        return f'<p class="muted">ok in {run.seconds:.1f} s · {html.escape(given)}</p>'
    return (
        f'<div class="verdict"><p class="bad"><strong>{html.escape(run.status)}</strong>: '
        f"{html.escape(run.reason)}</p><p>Configuration: {html.escape(given)}</p></div>"
    )


def table(frame, caption: str) -> str:
    """A table for a page of our own."""
    return show.table_html(frame, caption)
