"""`octavo dashboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def dashboard(
    folder: Path = Path("runs"),
    /,
    *,
    port: int | None = None,
    open_browser: Annotated[bool, Parameter(name="--open", negative=())] = False,
) -> int:
    """Show runs on a local web page, also while they train.

    Answers on this machine only, and changes nothing. For a run on another machine, forward the port:
    ssh -L 7117:127.0.0.1:7117 THAT_MACHINE. Ctrl-C ends it.

    Examples:

        octavo dashboard
        octavo dashboard runs/demo --open
        octavo dashboard runs/ --port 8000

    Parameters
    ----------
    folder
        Folder with runs in it at any depth, or one run.
    port
        Port to answer on; 0 for any that is free. By default 7117, or the next that is free.
    open_browser
        Open the page in a browser.
    """
    from octavo.monitor.dashboard.server import serve

    def ready(address: str) -> None:
        print(f"{folder}: {address} (Ctrl-C to end)", flush=True)
        if open_browser:
            import webbrowser

            webbrowser.open(address)

    serve(folder, port=port, ready=ready)
    return 0
