"""A headless Chromium driven over the DevTools protocol, by the websocket-client Jupyter brings."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --mute-audio "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--disable-dev-shm-usage --remote-debugging-port=0 --remote-allow-origins=* "
    "--window-size=1400,5000"
).split()


def required(what: str) -> None:
    """Skip for what is missing here; fail where CI says that nothing may be missing."""
    if os.environ.get("MLAKIT_REQUIRE_BROWSER"):
        pytest.fail(f"{what}, and MLAKIT_REQUIRE_BROWSER is set")
    pytest.skip(what)


class Page:
    """One tab. ``errors`` collects whatever its console calls an error."""

    def __init__(self, socket) -> None:
        self.socket, self.numbers, self.errors = socket, itertools.count(1), []
        self.session = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params):
        number = next(self.numbers)
        order = {"id": number, "method": method, "params": params}
        self.socket.send(json.dumps(order | ({"sessionId": self.session} if self.session else {})))
        while True:
            reply = json.loads(self.socket.recv())
            if reply.get("id") == number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self._event(reply.get("method"), reply.get("params", {}))

    def _event(self, method: str, params: dict) -> None:
        if method == "Page.javascriptDialogOpening":
            # "Leave without saving?" would hold up every later call.
            order = {"method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
            order |= {"id": next(self.numbers), "sessionId": self.session}
            self.socket.send(json.dumps(order))
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:600])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(json.dumps(params["entry"])[:600])

    def run(self, script: str):
        """The value of a JavaScript expression; a promise is waited for."""
        wanted = {"expression": script, "awaitPromise": True, "returnByValue": True}
        answer = self.call("Runtime.evaluate", **wanted)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str, seconds: float = 60):
        """The expression's value as soon as it is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                seen = self.run("document.body.innerText.slice(0, 3000)")
                pytest.fail(f"not true in {seconds} s: {script}\n{self.errors}\n{seen}")
            time.sleep(0.1)
        return value

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def click(self, selector: str, across: float = 0.5) -> None:
        """A left click with the mouse on an element, ``across`` of its width from its left."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        box = self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        at = {"x": box["x"] + across * box["width"], "y": box["y"] + box["height"] / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    def choose(self, selector: str, label: str) -> None:
        """Another option of a ``<select>``, whose list is the system's: no mouse reaches it."""
        self.run(
            f"{{const s = document.querySelector({selector!r});"
            f"s.value = [...s.options].find(o => o.text.replace(/\\s/g, ' ') == {label!r}).value;"
            "s.dispatchEvent(new Event('change', {bubbles: true}))}"
        )


@contextlib.contextmanager
def browser(profile):
    """A running Chromium's ``Page``; it and all that it started are gone afterwards."""
    if CHROMIUM is None:
        required("no chromium on PATH")
    websocket = pytest.importorskip("websocket")
    process = subprocess.Popen(
        [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        for line in process.stderr:
            if found := re.search(r"DevTools listening on (ws://\S+)", line):
                break
        else:
            pytest.fail("chromium ended before it listened")
        # A proxy of the environment would be asked for this address of the machine itself.
        socket = websocket.create_connection(found[1], timeout=300, http_no_proxy=["127.0.0.1"])
        yield Page(socket)
        socket.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
