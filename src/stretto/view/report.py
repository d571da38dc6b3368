"""One file that shows runs without a server: the page with its data inside.

It has every update, evaluation and version, and the timeline of the whole run at one resolution. It has a sample of
trajectories with their tokens (whole groups, spread evenly over the run) and of answers (those of the first and of the
last evaluation). The sample takes at most `SAMPLE_BYTES` for each run, so that the file can be sent by mail.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from stretto.errors import RunError
from stretto.store.verify import verify
from stretto.view.api import Api
from stretto.view.runs import RunSource
from stretto.view.search import MOST_ROWS
from stretto.view.server import page_files
from stretto.view.timeline import Window, starts_and_ends, timeline
from stretto.view.verification import findings_payload

SAMPLE_BYTES = 3_000_000  # of trajectories and answers, for each run
MOST_UPDATES = 5_000  # evenly chosen beyond that
ANSWERS_SHARE = 0.25  # of the sample
TIMELINE_BINS, TIMELINE_ROWS = 1_200, 120

Say = Callable[[str], None]


def write_report(runs: Sequence[RunSource], out: Path, *, verified: bool, tokenizer: Path | None, say: Say) -> int:
    """Writes a report of runs and returns its size in bytes. Raises `RunError` if the file cannot be written.

    With `verified` it has the findings of `verify`, which takes as long as that does.
    """
    api = Api(runs, tokenizer)
    data = {
        "made_at": time.time(),
        "comparison": api.answer("compare", {}),
        "runs": [_run(api, place, verified, say) for place in range(len(runs))],
    }
    page = render(data)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise RunError(f"`-o {out}` cannot be written: {error.strerror or error}") from error
    return out.stat().st_size


def _run(api: Api, place: int, verified: bool, say: Say) -> dict[str, Any]:
    run, key = api.runs[place], {"run": str(place)}
    say(f"{run.name}: reading its trajectories")
    while True:
        with run.columns(5.0) as (_, progress):
            if progress.is_whole:
                break
    state = run.state()
    state["folder"] = ""  # a path of this machine is nobody else's business
    curves = _thinned(run.curves())
    rows, trajectories, groups = _sample(api, key, progress.num_all)
    findings: dict[str, Any] = {"state": "not started", "changed": False}
    if verified:
        say(f"{run.name}: verifying")
        findings = {"state": "done", "changed": False, **findings_payload(verify(run.folder))}
    return {
        "state": state,
        "curves": curves,
        "recipe": run.recipe(),
        "notes": run.notes(),
        "verify": findings,
        "timeline": _timeline(run, state, curves),
        "num_trajectories": progress.num_all,
        "rows": rows,
        "trajectories": trajectories,
        "groups": groups,
        "answers": list(_answers(api, key, curves)),
    }


def _thinned(curves: dict[str, Any]) -> dict[str, Any]:
    """Leaves out updates evenly if there are very many."""
    count = len(curves["updates"]["update"])
    step = -(-count // MOST_UPDATES)
    if step > 1:
        curves["updates"] = {name: values[::step] for name, values in curves["updates"].items()}
    return curves


def _sample(api: Api, key: dict[str, str], count: int) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Returns rows of the list, trajectories and groups: whole groups, spread evenly, within the size."""
    room = SAMPLE_BYTES * (1 - ANSWERS_SHARE)
    rows, trajectories, groups = list[Any](), list[Any](), dict[str, Any]()
    for group in _spread(api, key, count):
        found = api.answer("group", {**key, "id": str(group)})
        members = [api.answer("trajectory", {**key, "id": str(each["trajectory"])}) for each in found["members"]]
        room -= len(json.dumps([found, members]))
        if room < 0 and groups:
            break
        groups[str(group)] = found
        trajectories += members
        listed = api.answer("trajectories", {**key, "group": str(group), "limit": str(MOST_ROWS)})
        rows += listed["rows"]
    return rows, trajectories, groups


def _spread(api: Api, key: dict[str, str], count: int) -> Iterator[int]:
    """Yields groups in an order in which every beginning is spread over the run: last, first, middle, quarters ..."""
    if not count:
        return
    newest = api.answer("trajectories", {**key, "limit": "1"})["rows"][0]["group"]
    seen: set[int] = set()
    parts = 1
    while len(seen) <= newest:
        for part in range(parts + 1):
            group = newest - round(newest * part / parts)
            if group not in seen:
                seen.add(group)
                yield group
        parts *= 2


def _answers(api: Api, key: dict[str, str], curves: dict[str, Any]) -> Iterator[Any]:
    """Yields answers of the first and the last evaluation to the same prompts, within the size."""
    made = [each["id"] for each in curves["evaluations"] if each["kind"] != "skipped"]
    if not made:
        return
    room = SAMPLE_BYTES * ANSWERS_SHARE
    chosen = list(dict.fromkeys((made[0], made[-1])))
    lists = [
        api.answer("answers", {**key, "evaluation": str(each), "limit": str(MOST_ROWS)})["rows"] for each in chosen
    ]
    for number in range(max(map(len, lists))):
        for evaluation, rows in zip(chosen, lists, strict=True):
            if number >= len(rows):
                continue
            row = rows[number]
            asked = {"evaluation": str(evaluation), "index": str(row["index"]), "greedy": str(row["greedy"])}
            found = api.answer("answer", {**key, **asked})
            room -= len(json.dumps(found))
            if room < 0:
                return
            yield found


def _timeline(run: RunSource, state: dict[str, Any], curves: dict[str, Any]) -> dict[str, Any]:
    times = [session[name] for session in state["sessions"] for name in ("started_at", "ended_at")]
    times += [version[1] for version in curves["versions"]] + curves["updates"]["finished_at"][-1:]
    times += [each["at"] for each in curves["evaluations"]] + ([state["status"]["at"]] if state["status"] else [])
    known = [at for at in times if at is not None] or [0.0]
    start, end = min(known) - 1.0, max(known) + 1.0
    window = Window(start, end, TIMELINE_BINS, version_rows=TIMELINE_ROWS, instance_rows=TIMELINE_ROWS)
    return {**timeline(run, window, end), **starts_and_ends(run, window, end), "bars": None}


def render(data: dict[str, Any]) -> str:
    """Returns the page with everything inside. It runs its own script alone, and loads nothing."""
    pages = {name: content.decode() for name, content in page_files().items()}
    page, style = pages["index.html"], pages["style.css"]
    names = [line.split('"')[1].removeprefix("/page/") for line in page.splitlines() if line.startswith("<script")]
    script = "\n".join(pages[name] for name in names)
    body = "\n".join(line for line in page.splitlines() if not line.startswith(("<script", "<link")))
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n</head>'
    # `<` ends no script element and begins no comment if it is escaped, and JSON reads it as before.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    embedded = f'<script type="application/json" id="embedded">{text}</script>\n<script>{script}</script>\n</body>'
    return body.replace("</head>", head, 1).replace("</body>", embedded, 1)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
