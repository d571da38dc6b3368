"""`stretto serve RUN`: answers the calls of programs with a trained policy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from stretto.cli import arguments
from stretto.errors import RunError

HELP = "serve a trained policy over HTTP, as OpenAI and Anthropic do; trains nothing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", type=arguments.path, metavar="RUN", help="a run folder that is finished, its `policy`, or a model folder"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=arguments.integer, default=8_000, help="port; 0: any (default: 8000)")
    parser.add_argument(
        "--key-file", type=arguments.path, metavar="FILE", help="file with the key (default: a random one is printed)"
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--rows", type=arguments.integer, default=32, help="calls generated at once (default: 32)")
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="of a call that names none (default: 1; 0 is greedy)"
    )


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.port < 65_536:
        raise RunError(f"`--port {options.port}` is no port: give a number from 0 to 65535")
    if options.rows < 1:
        raise RunError(f"`--rows {options.rows}` would answer no call; use at least 1")
    if not 0 <= options.temperature <= 100:
        raise RunError(f"`--temperature {options.temperature:g}` is no temperature: give a number of at least 0")
    key = None if options.key_file is None else _key(options.key_file)

    from stretto.assembly.serve import ServeOptions, serve

    serve(
        options.run,
        ServeOptions(options.host, options.port, key, options.device, options.rows, options.temperature),
        _print,
    )
    return 0


def _key(path: Path) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"`--key-file {path}` cannot be read: {error}") from error
    if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
        raise RunError(f"`--key-file {path}` holds no key: write one of at least 8 letters and digits, without spaces")
    return key


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
