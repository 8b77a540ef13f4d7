"""What a notebook shows: tables, figures with a text alternative, notes, and the end marker.

Everything is an explicit output (PNG or plain HTML), so papermill saves it, the report counts it,
and nothing depends on a browser's scripts or on a matplotlib backend.
"""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING

import pandas as pd
from markupsafe import Markup, escape

from mlakit.errors import MisuseError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_shown = {"figures": 0, "tables": 0}


def parameters(values: dict) -> None:
    """A table of the parameters in force, as this kernel holds them.

    Raises:
        MisuseError: a value of the wrong type or outside its set (checked in the kernel too).
    """
    from mlakit.report.parameters import NOTEBOOK_PARAMETERS, check

    _shown.update(figures=0, tables=0)
    held = {k: values[k] for k in NOTEBOOK_PARAMETERS if k in values}
    check(held)
    frame = pd.DataFrame({"parameter": list(held), "value": [repr(v) for v in held.values()]})
    table(frame, "Parameters in force")


def number(value: object) -> str:
    """Four significant digits for floats, thousands kept apart for integers, text as it is."""
    if value is None or value is pd.NA or (isinstance(value, float) and value != value):
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{int(value):,}" if abs(value) < 1e15 else f"{value:.4g}"


def table_html(frame: pd.DataFrame, caption: str, head: int | None = None) -> str:
    """``frame`` as an HTML table; text columns are left-aligned; all but ``Markup`` is escaped."""
    rows = frame if head is None else frame.head(head)
    columns = list(rows.columns)
    out = [f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">']
    out.append(f"<table><caption>{escape(caption)}</caption><thead><tr>")
    words = {c for c in columns if any(isinstance(v, str) for v in rows[c])}
    for c in columns:
        kind = ' class="text"' if c in words else ""
        out.append(f'<th scope="col"{kind}>{escape(str(c))}</th>')
    out.append("</tr></thead><tbody>")
    for row in rows.itertuples(index=False):
        cells = []
        for c, v in zip(columns, row, strict=True):
            text = v if isinstance(v, Markup) else escape(number(v))
            kind = ' class="text long"' if len(text) > 28 else ' class="text"' if c in words else ""
            cells.append(f"<td{kind}>{text}</td>")
        out.append(f"<tr>{''.join(cells)}</tr>")
    out.append("</tbody></table></div>")
    if head is not None and len(frame) > head:
        out.append(f'<p class="muted">{len(frame) - head} more rows are in the Parquet.</p>')
    return "".join(out)


def table(frame: pd.DataFrame, caption: str, head: int | None = None) -> None:
    """Show ``frame`` as a table with a caption; ``head`` rows at most."""
    _shown["tables"] += 1
    _display({"text/html": table_html(frame, caption, head), "text/plain": frame.to_string()})


def png(fig: Figure) -> bytes:
    """The figure as PNG, without the version and the time that matplotlib would note in it."""
    file = io.BytesIO()
    fig.savefig(file, format="png", bbox_inches="tight", metadata={"Software": "mlakit"})
    return file.getvalue()


def picture(fig: Figure, alt: str) -> str:
    """A figure as an ``<img>`` that holds its own PNG and its text alternative."""
    data = base64.b64encode(png(fig)).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'


def figure(fig: Figure, alt: str, frame: pd.DataFrame | None = None) -> None:
    """Show a figure as PNG with its text alternative, and the numbers behind it in a fold.

    Raises:
        MisuseError: no text alternative.
    """
    if not alt.strip():
        raise MisuseError("a figure needs a text alternative: say what it shows in one sentence")
    _shown["figures"] += 1
    _display({"image/png": png(fig), "text/plain": alt}, {"image/png": {"alt": alt}})
    if frame is not None and len(frame):
        inner = table_html(frame, f"Numbers behind: {alt}", head=80)
        _display({"text/html": f"<details><summary>the numbers</summary>{inner}</details>"})


def note(text: str, kind: str = "") -> None:
    """One paragraph, escaped; ``kind`` is '', ok, warn or bad."""
    _display({"text/html": f'<p class="{escape(kind)}">{escape(text)}</p>'})


def verdict(*sentences: str) -> None:
    """The notebook's answer, in a box."""
    inner = "".join(f"<p>{escape(s)}</p>" for s in sentences)
    _display({"text/html": f'<div class="verdict">{inner}</div>'})


def end() -> None:
    """The end marker: without it a run does not count as complete."""
    _display(
        {"text/html": '<p class="muted">End of the notebook.</p>'},
        {"mlakit": {"end": True, **_shown}},
    )


def _display(data: dict, metadata: dict | None = None) -> None:
    from IPython.display import display

    data.setdefault("text/plain", "")
    display(data, raw=True, metadata=metadata or {})
