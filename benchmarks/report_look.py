"""Checks a report in a real browser and takes pictures: light, dark, at phone width, and as PDF.

    python benchmarks/report_look.py report.html pictures/ [PART]

PART is a selector; part.png shows the matching element at the width of a page of the docs.
docs/pictures/report.png is ``"#learning"`` of README's run; docs/pictures/devices.png is
``"#devices .charts"`` of README's run on three devices. Needs Chromium (``chromium``,
``google-chrome`` or ``CHROMIUM=/path``) and ``pip install websockets``.

Checks that the page requests no other resource and is no wider than a phone. Texts need a contrast
of at least 4.5, graphics of at least 3 (WCAG 2.2, 1.4.3 and 1.4.11). The Tab key must reach all
elements that open or scroll. No graphic may exceed its chart, and no texts may overlap.
"""

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

DESKTOP, PHONE, PAGE = 1280, 390, 800
LEAST_TEXT, LEAST_GRAPHIC = 4.5, 3.0

# The browser computes the page's final styles, so this script does not parse CSS.
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
TEXT_COLOURS = """
[...new Set([...document.querySelectorAll('body *')]
  .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.data.trim()))
  .map(e => e instanceof SVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color))]
"""
DRAWN_COLOURS = """
[...new Set([...document.querySelectorAll('.line, .marks, .points, .axis, .fill, .cell')]
  .flatMap(e => { const s = getComputedStyle(e); return [s.stroke, s.fill]; })
  .filter(c => c != 'none'))]
"""
BOX = "JSON.stringify(document.querySelector('%s').getBoundingClientRect())"
GROUND = "getComputedStyle(document.body).backgroundColor"
OUTSIDE = """
[...document.querySelectorAll('figure svg[role=img]')].flatMap(svg => {
  const box = svg.viewBox.baseVal;
  return [...svg.querySelectorAll('text, path:not(defs *), rect')].filter(e => {
    const b = e.getBBox();
    return b.x < -1 || b.y < -1 || b.x + b.width > box.width + 1 || b.y + b.height > box.height + 1;
  }).map(e => svg.getAttribute('aria-label') + ': ' + (e.textContent || e.getAttribute('class')));
})
"""
OVERLAPS = """
[...document.querySelectorAll('figure svg[role=img]')].flatMap(svg => {
  const boxes = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBBox()]);
  const found = [];
  boxes.forEach(([s, a], i) => boxes.slice(i + 1).forEach(([t, b]) => {
    const wide = Math.min(a.x + a.width, b.x + b.width) - Math.max(a.x, b.x);
    const tall = Math.min(a.y + a.height, b.y + b.height) - Math.max(a.y, b.y);
    if (wide > 1 && tall > 3) found.push(svg.getAttribute('aria-label') + ': ' + s + ' | ' + t);
  }));
  return found;
})
"""
REACHABLE = "document.querySelectorAll('a, summary, [tabindex=\"0\"]').length"
HIDDEN = "document.querySelectorAll('details:not([open]) [tabindex=\"0\"]').length"
FOCUSED = "document.activeElement.tagName + (document.activeElement.getAttribute('href') ?? '')"


class Browser:
    """A tab of a headless Chromium, controlled by the DevTools protocol."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.requests: list[str] = []
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Call a method and return its result; record network requests that occur before it."""
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("method") == "Network.requestWillBeSent":
                self.requests.append(message["params"]["request"]["url"])
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def ask(self, expression: str) -> Any:
        """Evaluate an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def show(self, page: str, width: int, scheme: str) -> None:
        """Load the page at this width, with the colour scheme ``light`` or ``dark``."""
        preference = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", media="screen", features=[preference])
        self._size(width, 900)
        self.call("Page.navigate", url=page)
        while self.ask("document.readyState") != "complete":
            time.sleep(0.05)

    def picture(self, file: Path, width: int, part: str = "html", scale: int = 1) -> None:
        """Write the first element that matches the selector ``part`` as PNG."""
        self._size(width, int(self.ask("document.documentElement.scrollHeight")))
        box = json.loads(self.ask(BOX % part))
        options = {"format": "png", "captureBeyondViewport": True, "clip": {**box, "scale": scale}}
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", **options)["data"]))

    def _size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < DESKTOP,
        )

    def tab(self) -> str:
        """Press the Tab key; return the element that then has the focus."""
        key = {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9}
        self.call("Input.dispatchKeyEvent", type="keyDown", **key)
        self.call("Input.dispatchKeyEvent", type="keyUp", **key)
        return str(self.ask(FOCUSED))


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium until the context ends."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    program = next((found for name in names if name and (found := shutil.which(name))), None)
    if program is None:
        raise SystemExit("no Chromium found; install one or set CHROMIUM to its path")
    with tempfile.TemporaryDirectory() as home:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        place = [f"--user-data-dir={home}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen([program, *options, *place], stderr=subprocess.DEVNULL)
        try:
            with connect(_tab(Path(home)), max_size=None) as socket:
                yield Browser(socket)
        finally:
            process.terminate()
            process.wait()


def _tab(home: Path) -> str:
    """Wait for the browser; return the address of the first tab's socket."""
    import urllib.request

    port_file = home / "DevToolsActivePort"
    for _ in range(200):
        if port_file.exists() and "\n" in port_file.read_text():
            break
        time.sleep(0.05)
    port = port_file.read_text().splitlines()[0]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
        tabs = json.load(answer)
    return str(next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"))


def contrast(one: str, other: str) -> float:
    """WCAG's contrast ratio of two ``rgb(…)`` colours."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [
        p / 255 / 12.92 if p / 255 <= 0.04045 else ((p / 255 + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def check_colours(tab: Browser, name: str) -> list[str]:
    """Texts and graphics with too little contrast to the page's background."""
    ground, found = tab.ask(GROUND), []
    for colours, least in ((TEXT_COLOURS, LEAST_TEXT), (DRAWN_COLOURS, LEAST_GRAPHIC)):
        for colour in set(tab.ask(colours)) - {ground}:
            ratio = contrast(colour, ground)
            if ratio < least:
                found.append(f"{name}: {colour} on {ground}: contrast {ratio:.2f}, least {least}")
    return found


def check_keys(tab: Browser) -> list[str]:
    """The faults if the Tab key does not reach all elements."""
    wanted = tab.ask(REACHABLE) - tab.ask(HIDDEN)
    first = tab.tab()
    reached = 1 + sum(tab.tab() != "BODY" for _ in range(wanted - 1))
    faults = [] if first == "A#figures" else [f"keyboard: Tab leads to {first} first"]
    return faults + ([] if reached == wanted else [f"keyboard: {reached} of {wanted} reached"])


def look(page: Path, pictures: Path, part: str = "") -> list[str]:
    """Write the pictures; return the faults."""
    pictures.mkdir(parents=True, exist_ok=True)
    address, faults = page.resolve().as_uri(), []
    with browser() as tab:
        for name, width, scheme in (
            ("light", DESKTOP, "light"),
            ("dark", DESKTOP, "dark"),
            ("phone", PHONE, "light"),
        ):
            tab.show(address, width, scheme)
            faults += check_colours(tab, name)
            if (excess := tab.ask(OVERFLOW)) > 0:
                faults.append(f"{name}: {excess} px wider than {width}")
            tab.picture(pictures / f"{name}.png", width)
        if part:
            tab.show(address, PAGE, "light")
            tab.picture(pictures / "part.png", PAGE, part, 2)
        faults += [f"outside its chart: {each}" for each in tab.ask(OUTSIDE)]
        faults += [f"texts overlap: {each}" for each in tab.ask(OVERLAPS)]
        faults += check_keys(tab)
        tab.call("Emulation.setEmulatedMedia", media="", features=[])
        pdf = tab.call("Page.printToPDF", printBackground=False)["data"]
        (pictures / "print.pdf").write_bytes(base64.b64decode(pdf))
        strangers = sorted(set(tab.requests) - {address, "about:blank"})
    return faults + [f"asks for {each}" for each in strangers]


def main() -> None:
    if len(sys.argv) not in {3, 4}:
        raise SystemExit("usage: python benchmarks/report_look.py REPORT.html FOLDER [PART]")
    faults = look(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
    print("\n".join(faults) or f"nothing wrong; pictures in {sys.argv[2]}")
    raise SystemExit(bool(faults))


if __name__ == "__main__":
    main()
