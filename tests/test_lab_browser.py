"""The lab as a person meets it: JupyterLab in a real browser, notebooks run, controls moved."""

import base64
import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from devtools import browser, required

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def environment(home: Path) -> dict[str, str]:
    """A fresh user's: no settings, no kernels and no extensions but those of this environment."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "IPYTHON"))}
    return kept | {"HOME": str(home), "XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """The address of a JupyterLab over a copy of the notebooks."""
    pytest.importorskip("jupyterlab")
    home = tmp_path_factory.mktemp("home")
    shutil.copytree(NOTEBOOKS, home / "notebooks")
    for copy in (home / "notebooks").glob("*.ipynb"):
        # What measures, measures one small batch here.
        text = re.sub(r"batches = \[[\d, ]+\]", "batches = [16]", copy.read_text("utf-8"))
        copy.write_text(text, "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--expose-app-in-browser", f"--port={port}", "--ServerApp.port_retries=0"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={home / 'notebooks'}"]
    command += ["--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    command += ["--LabApp.news_url=None"]
    server = subprocess.Popen(
        command,
        cwd=home,
        env=environment(home),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), opener.open(f"{address}/api", timeout=5):
                break
            assert server.poll() is None, "jupyter lab ended"
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(0.1)
        yield address
    finally:
        # Asked politely, the server ends its kernels, which have sessions of their own.
        os.killpg(server.pid, signal.SIGINT)
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@pytest.fixture(scope="module")
def page(tmp_path_factory, lab):
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


OTHERS = sorted(
    str(p.relative_to(NOTEBOOKS)) for p in NOTEBOOKS.rglob("*.ipynb") if p.stem != "explore"
)
PANEL = "window.jupyterapp.shell.currentWidget"
CELLS = f"{PANEL}.content.widgets"


def run_all(page, lab, name: str) -> None:
    """Open a notebook in the lab and run every cell; no cell may fail. The one before it ends."""
    if page.run("!!window.jupyterapp"):
        page.run(f"{PANEL}?.sessionContext?.shutdown()")
    page.open(f"{lab}/lab/tree/{name}?reset")
    page.wait("window.jupyterapp?.shell.currentWidget?.content?.widgets?.length > 1")
    page.wait(f"{PANEL}.sessionContext?.session?.kernel != null")
    page.wait(f"{PANEL}.sessionContext.isReady")
    assert page.run("window.jupyterapp.commands.execute('notebook:run-all-cells')") is not False
    failed = f"{CELLS}.some(c => c.outputArea?.model.toJSON().some(o => o.output_type == 'error'))"
    assert not page.run(failed), page.run("document.body.innerText.slice(0, 3000)")
    unrun = f"{CELLS}.filter(c => c.model.type == 'code' && !c.model.executionCount).length"
    assert page.run(unrun) == 0
    # An unsaved notebook would ask before it is left.
    page.run("window.jupyterapp.commands.execute('docmanager:save')")


def explorer(name: str) -> str:
    """JavaScript for the explorer that holds the control called ``name``."""
    return f"document.querySelector('.mlakit-{name}').closest('.widget-vbox')"


EXPLORERS = {"dispatch": "arch", "speed": "lane", "drift": "one", "codegen": "arch"}
"""Each explorer and one of its controls."""


@pytest.fixture(scope="module")
def opened(page, lab):
    run_all(page, lab, "explore.ipynb")
    page.wait("document.querySelectorAll('.mlakit').length >= 4")
    return page


@pytest.mark.parametrize("name", EXPLORERS)
def test_an_explorer_looks_like_something(opened, name):
    """``make screenshots`` keeps what is seen here under docs/."""
    import io

    from PIL import Image

    box = explorer(f"{name}-{EXPLORERS[name]}")
    opened.wait(f"{box}.querySelector('.mlakit img, .mlakit table') != null")
    opened.run(f"{box}.scrollIntoView({{block: 'center'}})")
    clip = opened.run(
        f"(r => ({{x: r.x, y: r.y, width: Math.min(r.width, 1000), "
        f"height: Math.min(r.height, 900), scale: 0.75}}))({box}.getBoundingClientRect())"
    )
    shot = opened.call("Page.captureScreenshot", format="png", clip=clip)["data"]
    image = Image.open(io.BytesIO(base64.b64decode(shot))).convert("RGB")
    assert min(image.size) > 200
    assert len(image.getcolors(1 << 24)) > 50
    if os.environ.get("MLAKIT_WRITE_IMAGES"):
        file = NOTEBOOKS.parent / "docs" / f"explore-{name}.png"
        image.quantize(64).save(file, optimize=True)


def test_each_explorer_paints_by_itself(opened):
    """Seconds from running a cell to its explorer, printed; the machine may be busy."""
    script = f"""(async () => {{
      const seconds = [], app = window.jupyterapp, content = {PANEL}.content;
      for (let i = 0; i < content.widgets.length; i++) {{
        const cell = content.widgets[i];
        if (!cell.node.querySelector('.mlakit')) continue;
        content.activeCellIndex = i;
        cell.model.sharedModel.clearOutputs?.();
        const start = performance.now();
        await app.commands.execute('notebook:run-cell');
        while (!cell.node.querySelector('.mlakit')) await new Promise(r => setTimeout(r, 10));
        seconds.push((performance.now() - start) / 1000);
      }}
      return seconds;
    }})()"""
    seconds = opened.run(script)
    print("first paint, s:", *(f"{s:.2f}" for s in seconds))
    assert len(seconds) == len(EXPLORERS)


def shown(page, control: str) -> str:
    return page.run(f"{explorer(control)}.querySelector('.mlakit').innerText")


@pytest.mark.parametrize(
    ("control", "label", "seen"),
    [
        ("dispatch-weight_dtype", "mxfp4", "aiter_mxfp4"),
        ("dispatch-before", "sglang_after_fix", "No difference"),
        ("drift-other", "formula: bf16_rstd", "formula: bf16_rstd"),
        ("drift-family", "outlier", "share_correct"),
        ("codegen-model", "MiniCPM3", "q_warps"),
    ],
)
def test_an_option_that_is_chosen_changes_what_is_shown(opened, control, label, seen):
    before = shown(opened, control)
    opened.choose(f".mlakit-{control} select", label)
    text = f"{explorer(control)}.querySelector('.mlakit').innerText"
    opened.wait(f"{text} != {before!r} && {text}.includes({seen!r})", 20)
    assert opened.errors == []


def test_mouse_on_a_slider_and_on_a_box(opened):
    opened.choose(".mlakit-dispatch-weight_dtype select", "bf16")
    opened.click(".mlakit-dispatch-m .noUi-base", across=0.99)
    opened.wait(
        "document.querySelector('.mlakit-dispatch-m .widget-readout').innerText == '32768'", 20
    )
    opened.wait("document.querySelector('.mlakit strong').innerText.includes('launches: 2')", 20)
    opened.click(".mlakit-dispatch-aiter input")
    opened.wait("!document.querySelector('.mlakit strong').innerText.includes('aiter_')", 20)
    assert opened.errors == []


def test_a_call_that_cannot_be_is_one_line(opened):
    """MXFP4 on a card without it: the explorer says so, no traceback, nothing breaks."""
    text = f"{explorer('dispatch-arch')}.querySelector('.mlakit').innerText"
    for arch, weights, said in (
        ("gfx942", "mxfp4", "that card has no MXFP4"),
        ("gfx950", "bf16", "no gfx950 on this machine"),
        ("gfx942", "mxfp4", "that card has no MXFP4"),
    ):
        # In one breath: the kernel is busy with the first change while the second arrives.
        opened.choose(".mlakit-dispatch-weight_dtype select", weights)
        opened.choose(".mlakit-dispatch-arch select", arch)
        opened.wait(f"{text}.includes({said!r})", 20)
    assert opened.errors == []


@pytest.mark.parametrize("name", OTHERS)
def test_notebooks_run_in_the_lab(page, lab, name):
    run_all(page, lab, name)
    assert page.run("document.querySelectorAll('.jp-OutputArea-output').length") > 2
    assert page.errors == []


def test_what_is_required_is_never_skipped(monkeypatch):
    monkeypatch.setenv("MLAKIT_REQUIRE_BROWSER", "1")
    with pytest.raises(pytest.fail.Exception, match="MLAKIT_REQUIRE_BROWSER"):
        required("no browser")
