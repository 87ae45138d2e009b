"""Answers of the server, and rejected requests."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ConfigError, UnsupportedError
from octavo.lab.monitor.dashboard import page, server
from octavo.lab.monitor.store import RunReader
from octavo.lab.train.config import LoopConfig

pytest.importorskip("starlette")
pytest.importorskip("plotly")
testing = pytest.importorskip("starlette.testclient")

MIDDLE = "layers.1.attention.wo"


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[Any]:
    with testing.TestClient(server.application(folder), base_url="http://localhost:7117") as client:
        yield client


def test_the_page_and_all_it_names(client: Any) -> None:
    found = client.get("/")
    assert found.status_code == 200 and found.headers["content-type"].startswith("text/html")
    named = set(re.findall(r'(?:src|href)="(/[^"]+)"', found.text)) | set(re.findall(r'"(/static/[^"]+)"', found.text))
    assert {"/static/app.js", "/static/style.css", "/static/plotly.min.js"} <= named
    assert {client.get(each).status_code for each in named} == {200}
    assert not re.search(r"https?://", found.text)


def test_scripts_import_only_one_another() -> None:
    names = {f"octavo/{name}" for name in page.scripts()}
    imported = {name for text in page.scripts().values() for name in re.findall(r'from "([^"]+)"', text)}
    assert imported <= names
    assert not any(
        re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|eval\(", text) for text in page.scripts().values()
    )


def test_scripts_read_settings_that_a_run_has() -> None:
    read = {name for text in page.scripts().values() for name in re.findall(r"config\.run\?\.(\w+)", text)}
    assert read and read <= {each.name for each in fields(LoopConfig)}


def test_runs(client: Any) -> None:
    found = client.get("/api/runs").json()
    assert {run["id"] for run in found["runs"]} == {"first", "sweep/tensorwise"}
    first = next(run for run in found["runs"] if run["id"] == "first")
    assert (first["state"], first["step"], first["steps"], first["level"]) == ("finished", 240, 240, "healthy")


def test_a_run(client: Any, folder: Path) -> None:
    found = client.get("/api/run", params={"run": "sweep/tensorwise"}).json()
    reader = RunReader(folder / "sweep" / "tensorwise")
    assert found["config"] == reader.config and found["plan"]["recipe"] == "tensorwise"
    assert len(found["layers"]) == 14 and found["step"] == 120
    assert found["newest"]["loss_fp8"] == reader.scalar("loss_fp8").high[-1]
    assert found["verdict"]["level"] == "healthy"


def test_scalars_are_those_of_the_store(client: Any, folder: Path, unpack: Any) -> None:
    answer = client.get("/api/scalars", params={"run": "first", "key": ["loss_fp8", "lr"], "points": 50})
    _, arrays = unpack(answer.content)
    steps, values = RunReader(folder / "first").scalar("loss_fp8", points=50).points()
    np.testing.assert_array_equal(arrays["loss_fp8/x"], steps)
    np.testing.assert_array_equal(arrays["loss_fp8/y"], values)
    assert set(arrays) == {"loss_fp8/x", "loss_fp8/y", "lr/x", "lr/y"} and len(steps) <= 50


@pytest.mark.parametrize("pool", ["max", "min"])
def test_heat_maps_are_those_of_the_store(client: Any, folder: Path, unpack: Any, pool: str) -> None:
    asked = {"run": "first", "stat": "saturated", "role": "grad_output", "pool": pool, "buckets": 30}
    header, arrays = unpack(client.get("/api/heatmap", params=asked).content)
    expected = RunReader(folder / "first").heatmap("saturated", "grad_output", pool=pool, buckets=30)
    assert header["layers"] == list(expected.layers)
    np.testing.assert_array_equal(arrays["values"], expected.values)
    reader = RunReader(folder / "first")
    since = reader.last_step - reader.last_step // 10 + 1
    late = reader.heatmap("saturated", "grad_output", pool=pool, first=since, buckets=1)
    np.testing.assert_array_equal(arrays["newest"], late.values)  # whatever the number of buckets
    hot = arrays["values"][header["layers"].index(MIDDLE)]
    assert hot.max() == (0.25 if pool == "max" else 0)


def test_series_of_a_layer(client: Any, folder: Path, unpack: Any) -> None:
    _, arrays = unpack(client.get("/api/series", params={"run": "first", "layer": MIDDLE, "stat": "amax"}).content)
    for role in ("input", "weight", "grad_output"):
        steps, values = RunReader(folder / "first").series(MIDDLE, role, "amax").points()
        np.testing.assert_array_equal(arrays[f"{role}/x"], steps)
        np.testing.assert_array_equal(arrays[f"{role}/y"], values)


def test_histograms_have_their_window(client: Any) -> None:
    found = client.get("/api/histograms", params={"run": "first", "layer": MIDDLE}).json()
    assert set(found) == {"input", "weight", "grad_output", "grad_weight"}
    assert found["grad_weight"]["window"] is None
    held = found["input"]
    assert held["sqnr"] == pytest.approx(30, rel=0.2)
    assert held["window"]["format"] == "e4m3" and held["window"]["lowest"] < held["window"]["normal"]
    assert 0 < held["above"] < 0.05 and held["below"] < 0.01


def test_events_performance_and_comparison(client: Any, unpack: Any) -> None:
    events = client.get("/api/events", params={"run": "first"}).json()
    assert [(event["layer"], event["rule"]) for event in events["events"]] == [(MIDDLE, "saturation")]
    header, arrays = unpack(client.get("/api/performance", params={"run": "first"}).content)
    assert header["facts"]["speedup"] == pytest.approx(1.5, rel=0.05) and "gpu_power_watts/y" in arrays
    compared = client.get("/api/compare", params={"run": ["first", "sweep/tensorwise"]}).json()
    differs = {each["key"]: each["values"] for each in compared["differences"]}
    assert differs["run.recipe"] == ["folded", "tensorwise"] and "optimizer.lr" not in differs


@pytest.mark.parametrize(
    ("address", "status", "told"),
    [
        ("/api/run?run=frist", 404, "Did you mean 'first'?"),
        ("/api/run?run=../first", 404, "no run"),
        ("/api/run?run=/etc", 404, "no run"),
        ("/api/run", 400, "required once"),
        ("/api/run?run=first&run=first", 400, "required once"),
        ("/api/heatmap?run=first&stat=amx&role=input", 400, "Did you mean 'amax'?"),
        ("/api/heatmap?run=first&stat=amax&role=output", 400, "grad_output"),
        ("/api/heatmap?run=first&stat=amax&role=input&buckets=99999999", 400, "from 1 to"),
        ("/api/scalars?run=first&points=-1", 400, "from 1 to"),
        ("/api/series?run=first&layer=layers.9&stat=amax", 404, "no layer"),
        ("/api/nothing", 404, "unknown request"),
    ],
)
def test_wrong_questions_are_told_what_is_wrong(client: Any, address: str, status: int, told: str) -> None:
    found = client.get(address)
    assert found.status_code == status
    assert told in found.json()["error"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static/%2e%2e/%2e%2e/errors.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/first/run.sqlite",
        "/static/run.sqlite",
        "/static/index.html",
    ],
)
def test_no_path_leads_out(client: Any, path: str) -> None:
    found = client.get(path)
    assert found.status_code == 404
    assert "root:" not in found.text and "import" not in found.text


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:7117", 200),
        ("LOCALHOST", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:7117", 200),
        ("evil.example", 403),
        ("evil.example:7117", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example:7117", 403),
        ("localhost@evil.example", 403),
        ("192.168.0.4:7117", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js"])
def test_foreign_hosts_are_refused(client: Any, host: str, status: int, path: str) -> None:
    assert client.get(path, headers={"host": host}).status_code == status


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_pages_are_refused(client: Any, site: str) -> None:
    assert client.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200  # a link may lead here


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/", "/api/runs", "/static/app.js"])
def test_nothing_can_be_written(client: Any, method: str, path: str) -> None:
    assert client.request(method, path).status_code == 405


def test_every_answer_keeps_other_origins_out(client: Any) -> None:
    for path in ("/", "/api/runs", "/api/nothing", "/static/app.js", "/static/plotly.min.js", "/nowhere"):
        headers = client.get(path).headers
        assert headers["cross-origin-resource-policy"] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert client.get("/", headers={"host": "evil.example"}).headers["x-frame-options"] == "DENY"


def test_looking_changes_nothing(client: Any, folder: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {
            str(file): (file.stat().st_size, file.stat().st_mtime_ns)
            for file in folder.rglob("*")
            if file.is_file() and not file.name.endswith(("-wal", "-shm"))
        }

    before = state()
    for answer in ("run", "live", "events", "performance", "scalars"):
        assert client.get(f"/api/{answer}", params={"run": "first"}).status_code == 200
    assert state() == before


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    find = page.importlib.util.find_spec
    monkeypatch.setattr(
        page.importlib.util, "find_spec", lambda name: None if name in ("uvicorn", "plotly") else find(name)
    )
    with pytest.raises(UnsupportedError, match=r'needs uvicorn, plotly, which are .*pip install "octavo\[dashboard\]"'):
        server.serve(folder)


@pytest.mark.parametrize(("port", "told"), [(70000, "0 to 65535"), (None, "")])
def test_ports(port: int | None, told: str) -> None:
    if port is not None:
        with pytest.raises(ConfigError, match=told), server.bound(port):
            pass
        return
    with server.bound(0) as first:
        taken = first.getsockname()[1]
        assert first.getsockname()[0] == "127.0.0.1"
        with pytest.raises(ConfigError, match="already in use"), server.bound(taken):
            pass


def test_the_command_serves_needs_no_torch_and_ends_at_an_interrupt(folder: Path) -> None:
    code = "import sys, octavo.lab.cli.main as m\ntry: m.main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "dashboard", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(60, process.kill)
    killer.start()
    try:
        assert process.stdout is not None
        address = re.findall(r"http://127\.0\.0\.1:\d+", process.stdout.readline())[0]
        with urllib.request.urlopen(f"{address}/api/runs", timeout=20) as answer:
            assert len(json.load(answer)["runs"]) == 2
        for path in ("run?run=first", "performance?run=first", "histograms?run=first&layer=" + MIDDLE):
            urllib.request.urlopen(f"{address}/api/{path}", timeout=20).close()
        process.send_signal(2)
        said, _ = process.communicate(timeout=20)
        assert said.split() == ["False"]
    finally:
        killer.cancel()
        process.kill()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_a_connection_that_completes_no_request_is_closed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    import uvicorn

    monkeypatch.setattr(server, "SLOW_SECONDS", 0.2)
    with server.bound(0) as listener:
        config = uvicorn.Config(server.application(folder), http=server._timed_protocol(), log_level="error")
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        with (
            socket.create_connection(listener.getsockname(), timeout=20) as client,
            contextlib.suppress(ConnectionError),  # closed before the last byte, on a slow machine
        ):
            for byte in sent:  # drop by drop
                client.send(bytes([byte]))
                time.sleep(0.005)
            assert client.recv(1) == b""  # closed; a timeout would raise
        running.should_exit = True
        thread.join(20)
