"""Runs `verify` in a process of its own, so that the page stays quick, and reports its progress.

    python -m stretto.view.verification RUN

prints a JSON object a line: `{"words", "share"}` while it works, and at last `{"findings"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from stretto.errors import StrettoError
from stretto.store.verify import NAMES, Finding, conclusion, verify
from stretto.view.runs import RunSource

SAY_S = 0.1  # the least time between two reports


def findings_payload(findings: list[Finding]) -> dict[str, Any]:
    """Returns the findings of `verify` for the page."""
    return {
        "holds": all(finding.holds for finding in findings),
        "conclusion": conclusion(findings),
        "findings": [
            asdict(finding) | {"holds": finding.holds, "name": " ".join(NAMES[finding.law].split())}
            for finding in findings
        ],
    }


class Verification:
    """The verification of one run. It is kept until the journal changes, which that of a finished run does not."""

    def __init__(self, run: RunSource) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._state: dict[str, Any] = {"state": "not started"}
        self._fingerprint = ""

    def start(self) -> dict[str, Any]:
        """Begins, unless it runs or its result still holds. Returns the state."""
        with self._lock:
            if self._process is None and not (
                self._state["state"] == "done" and self._fingerprint == self._run.fingerprint()
            ):
                self._fingerprint = self._run.fingerprint()
                self._state = {"state": "running", "words": "starting", "share": 0.0, "started_at": time.time()}
                command = [sys.executable, "-m", "stretto.view.verification", str(self._run.folder)]
                self._process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
                )
                threading.Thread(target=self._follow, args=(self._process,), name="verify", daemon=True).start()
        return self.state()

    def state(self) -> dict[str, Any]:
        """Returns `not started`, `running` with its progress, `done` with the findings, or `failed` with an error.

        `changed` says that the journal has grown since.
        """
        with self._lock:
            return {**self._state, "changed": self._fingerprint not in ("", self._run.fingerprint())}

    def close(self) -> None:
        """Ends the process, if it runs."""
        if (process := self._process) is not None:
            process.kill()
            process.wait()

    def _follow(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        assert process.stderr is not None
        last: dict[str, Any] = {}
        for line in process.stdout:
            last = json.loads(line)
            if "words" in last:
                with self._lock:
                    self._state |= last
        said, status = process.stderr.read(), process.wait()
        with self._lock:
            self._process = None
            if "findings" in last:
                self._state = {"state": "done", "at": time.time(), **last}
            else:
                words = last.get("error") or said.strip()[-500:] or f"it ended with status {status}"
                self._state = {"state": "failed", "error": words}


def main(folder: str) -> int:
    """Verifies a run and prints the progress and the result."""
    said_at = 0.0

    def say(words: str, share: float) -> None:
        nonlocal said_at
        if time.monotonic() - said_at >= SAY_S:
            said_at = time.monotonic()
            _print({"words": words, "share": round(share, 4)})

    try:
        _print(findings_payload(verify(folder, say)))
    except StrettoError as error:
        _print({"error": str(error)})
        return 2
    return 0


def _print(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
