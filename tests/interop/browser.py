"""A headless Chromium, spoken to through a pipe: Debian's browser and the standard library, nothing in between."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time

PATIENCE = 60  # seconds until a browser that does not answer counts as stuck


def find():
    """The browser's path, or None."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One tab. Errors that its pages report are in `errors`, addresses that they ask for in `requests`."""

    def __init__(self):
        self.profile = tempfile.TemporaryDirectory(prefix="tapetune-browser-")
        reading, theirs_out = os.pipe()
        theirs_in, writing = os.pipe()
        words = "headless=new no-sandbox disable-gpu disable-dev-shm-usage no-first-run disable-background-networking"
        options = [f"--{word}" for word in (*words.split(), f"user-data-dir={self.profile.name}", "remote-debugging-pipe")]
        # The browser reads descriptor 3 and writes 4.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, find(), *options],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.out, self.descriptor, self.buffer = writing, reading, b""
        os.set_blocking(reading, False)
        self.calls, self.session, self.errors, self.requests, self.events = 0, None, [], [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(PATIENCE)
        os.close(self.out)
        os.close(self.descriptor)
        self.profile.cleanup()

    def message(self):
        end = time.monotonic() + PATIENCE
        while b"\0" not in self.buffer:
            assert time.monotonic() < end, "the browser does not answer"
            try:
                part = os.read(self.descriptor, 1 << 20)
                assert part, f"the browser ended with {self.process.wait(PATIENCE)}"
                self.buffer += part
            except BlockingIOError:
                time.sleep(0.005)
        line, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(line)

    def call(self, method, **parameters):
        self.calls += 1
        request = {"id": self.calls, "method": method, "params": parameters}
        if self.session:
            request["sessionId"] = self.session
        os.write(self.out, json.dumps(request).encode() + b"\0")
        while (answer := self.message()).get("id") != self.calls:
            self.note(answer)
        assert "error" not in answer, f"{method}: {answer.get('error')}"
        return answer["result"]

    def note(self, event):
        kind, said = event.get("method"), event.get("params", {})
        self.events.append(kind)
        if kind == "Runtime.exceptionThrown":
            details = said["exceptionDetails"]
            self.errors.append(f"{details.get('text')} {details.get('exception')}")
        elif kind == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(said["entry"]["text"])
        elif kind == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(str(said["args"]))
        elif kind == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])

    def open(self, path, width, dark=False):
        """Loads a file at a width, in one of the two colour schemes."""
        shape = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **shape)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.absolute().as_uri())
        while "Page.loadEventFired" not in self.events:
            self.note(self.message())

    def evaluate(self, script):
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, file):
        """The whole page as a PNG."""
        height = self.evaluate("document.documentElement.scrollHeight")
        width = self.evaluate("innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))
