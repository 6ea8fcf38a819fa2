"""A real browser for the tests: Debian's Chromium without a window, told what to do over the DevTools protocol.

The protocol runs over two pipes (`--remote-debugging-pipe`: JSON, each message ended by a zero byte), so neither a driver
program nor a package is needed.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PATIENCE = 60  # seconds, on a machine that is busy


class Browser:
    """One page: `open` it, `run` JavaScript in it, move the mouse, press keys; `complaints` is what its console said."""

    def __init__(self) -> None:
        assert CHROMIUM is not None
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        read_commands, self._out = os.pipe()
        self._in, write_answers = os.pipe()
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe"]
        flags += [
            "--no-first-run",
            "--disable-breakpad",
            "--disable-crash-reporter",
            "--hide-scrollbars",
            f"--user-data-dir={self._profile.name}",
        ]
        # Chromium reads from file descriptor 3 and writes to 4; the shell puts the pipes there
        shell = f'exec "$0" "$@" 3<&{read_commands} 4>&{write_answers}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, CHROMIUM, *flags, "about:blank"],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        self._rest, self._number, self._session = b"", 0, None
        self.complaints: list[str] = []
        self._loaded = False
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.tell("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.tell(f"{domain}.enable")
        self.size(1200, 900)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=_PATIENCE)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    # ── the protocol ─────────────────────────────────────────────────────────────────────────────────────────────────

    def tell(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._in, 1 << 16)
            assert read, "Chromium has gone"
            self._rest += read
        text, _, self._rest = self._rest.partition(b"\0")
        message = dict(json.loads(text))
        match message.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(message["params"]["exceptionDetails"]))
            case "Runtime.consoleAPICalled" | "Log.entryAdded":
                self.complaints.append(json.dumps(message["params"]))
        return message

    # ── what a person does ───────────────────────────────────────────────────────────────────────────────────────────

    def open(self, address: str | Path) -> None:
        self.complaints.clear()
        self._loaded = False
        self.tell("Page.navigate", url=address.resolve().as_uri() if isinstance(address, Path) else address)
        while not self._loaded:
            self._receive()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, what: Callable[[Any], bool] = bool) -> Any:
        """The value of an expression as soon as it is as wanted."""
        until = time.monotonic() + _PATIENCE
        while not what(value := self.run(expression)):
            assert time.monotonic() < until, f"{expression} stayed {value!r}"
            time.sleep(0.05)
        return value

    def size(self, width: int, height: int, phone: bool = False) -> None:
        self.tell("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def media(self, media: str = "", dark: bool = False) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """A point of an element, scrolled into view: its share of the width and of the height."""
        x, y, width, height = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({block: 'center', behavior: 'instant'});"
            " const b = e.getBoundingClientRect(); return [b.x, b.y, b.width, b.height]; })()"
        )
        return x + across * width, y + down * height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.tell("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def point(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        self.mouse("mouseMoved", *self.place(selector, across, down))

    def click(self, selector: str) -> None:
        self.drag(selector, 0.5, 0.5)

    def drag(self, selector: str, start: float, end: float) -> None:
        """Press the button at one place across an element and let go at another."""
        x, y = self.place(selector, start)
        to, _ = self.place(selector, end)
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, button="left", buttons=1, clickCount=1)
        if end != start:
            for part in (0.3, 0.7, 1.0):
                self.mouse("mouseMoved", x + part * (to - x), y, button="left", buttons=1)
        self.mouse("mouseReleased", to, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        self.tell("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.tell("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, whole: bool = False) -> None:
        """What is to be seen, as a PNG."""
        shot = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def paper(self) -> bytes:
        """The page as it is printed, a PDF."""
        return base64.b64decode(self.tell("Page.printToPDF", printBackground=True, paperWidth=8.27, paperHeight=11.69)["data"])
