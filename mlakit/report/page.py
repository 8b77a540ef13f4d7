"""Offline HTML: one self-contained page, from a notebook or from a template of our own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from markupsafe import Markup, escape

from mlakit.report import scrub
from mlakit.report.runbook import NotebookRun

_TEMPLATES = Path(__file__).parent / "templates"


def write(file: Path, template: str = "page.html.j2", **values) -> Path:
    """``file`` as a whole page, without paths, names and tokens; it needs nothing but itself.

    ``values`` are escaped unless they are ``Markup``; every page wants ``title`` and ``footer``.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template).render(highlight_css=_highlight_css(), **values)
    file.write_text(scrub.text(text), encoding="utf-8")
    return file


@cache
def _highlight_css() -> Markup:
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style="friendly_grayscale").get_style_defs(".highlight")
    # One palette cannot serve both schemes with enough contrast.
    dark = "@media (prefers-color-scheme: dark) { .highlight * { color: inherit !important; } }"
    return Markup(light + dark)


def write_notebook(file: Path, source: Path, run: NotebookRun, footer: str) -> Path:
    """The page of an executed (or half-executed) notebook, its error and parameters on top."""
    title = f"{run.name} · {run.parameters.get('arch', '')}".rstrip(" ·")
    head = f'<p><a href="index.html">all pages of this report</a></p>{_status_line(run)}'
    why = "Nothing was saved: it never started."
    try:
        body = _notebook_html(source) if source.exists() else ""
    except ValueError:  # the disk was full
        body, why = "", "What was saved does not read."
    body = body or Markup("<h1>{}</h1><p>{}</p>").format(title, why)
    return write(file, title=title, body=Markup(head + body), footer=footer)


def _notebook_html(source: Path) -> str:
    import nbformat
    from nbconvert import HTMLExporter
    from traitlets.config import Config

    exporter = HTMLExporter(
        template_name="notebook", extra_template_basedirs=[str(_TEMPLATES)], config=Config()
    )
    exporter.exclude_input_prompt = exporter.exclude_output_prompt = True
    exporter.exclude_anchor_links = True
    nb = nbformat.read(source, as_version=4)
    # papermill's banner cells link by anchors that this template does not write.
    nb.cells = [c for c in nb.cells if "papermill-error-cell-tag" not in c.metadata.get("tags", [])]
    return exporter.from_notebook_node(nb)[0]


def _status_line(run: NotebookRun) -> str:
    given = escape(", ".join(f"{k}={v!r}" for k, v in run.parameters.items()))
    if run.status == "ok":
        return f'<p class="muted">ok in {run.seconds:.1f} s · {given}</p>'
    return (
        f'<div class="verdict"><p class="bad"><strong>{escape(run.status)}</strong>: '
        f"{escape(run.reason)}</p><p>Configuration: {given}</p></div>"
    )
