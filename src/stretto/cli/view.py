"""`stretto view RUN ...`: serves a page that shows runs, while they go on and afterwards."""

from __future__ import annotations

import argparse
import sys
import webbrowser

from stretto.cli import arguments
from stretto.errors import RunError

HELP = "show runs in a browser, while they go on and afterwards: curves, timeline, trajectories, comparison"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    arguments.add_runs(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine alone)")
    parser.add_argument("--port", type=arguments.integer, default=8_800, help="port; 0: any (default: 8800)")
    browser = parser.add_mutually_exclusive_group()
    browser.add_argument("--open", action="store_true", help="open a browser")
    browser.add_argument("--no-browser", dest="open", action="store_false", help="open none (default)")
    arguments.add_tokenizer(parser)


def run(options: argparse.Namespace) -> int:
    if not 0 <= options.port < 65_536:
        raise RunError(f"`--port {options.port}` is no port: give a number from 0 to 65535")
    from stretto.api.run_files import tokenizer_file

    tokenizer = tokenizer_file(options.tokenizer)
    from stretto.view.api import Api
    from stretto.view.runs import open_runs, refuse_unreadable
    from stretto.view.server import ViewServer

    runs = open_runs(options.runs)
    refuse_unreadable(runs)
    server = ViewServer(Api(runs, tokenizer), options.host, options.port)
    try:
        sys.stdout.write(f"{server.url} shows {', '.join(each.name for each in runs)}; Ctrl-C ends\n")
        sys.stdout.flush()
        if options.open:
            webbrowser.open(server.url)
        server.serve_forever(poll_interval=0.5)
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0
