"""A real Prefect server and a real worker, on a port and in a home of their own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

ROOT = Path(__file__).resolve().parents[2]
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PATIENCE_S = 240.0
Answer = TypeVar("Answer")

REQUEST_S = 150  # flows that start beside it keep a small machine busy for a long moment


class PrefectServer:
    """Started by this process, and ended by the ids of the processes it started."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.folder = folder
        self.api = f"http://127.0.0.1:{port}/api"
        self.environment = os.environ | {
            "DO_NOT_TRACK": "1",
            "OMP_NUM_THREADS": "1",
            "PREFECT_API_URL": self.api,
            "PREFECT_HOME": str(folder / "home"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "2",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        self._started: list[subprocess.Popen[bytes]] = []
        self.start("server", "start", "--host", "127.0.0.1", "--port", str(port))
        wait_until(self.is_ready, "the server does not answer")

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.api}/health").is_success
        except httpx.HTTPError:
            return False

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start `prefect ARGUMENTS` as the leader of a group of processes, in an empty folder."""
        with (self.folder / f"{arguments[0]}.log").open("ab") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "prefect", *arguments],
                stdout=log, stderr=log, cwd=self.folder, env=self.environment,
                start_new_session=True,
            )  # fmt: skip
        self._started.append(child)
        return child

    def rrl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "flows.cli", *arguments],
            capture_output=True, text=True, cwd=self.folder, env=self.environment, check=False,
        )  # fmt: skip

    def request(self, method: str, path: str, **body: Any) -> Any:
        """Ask the server, again when its SQLite is busy: Prefect's client does that too."""
        for _ in range(5):
            answer = httpx.request(method, self.api + path, timeout=REQUEST_S, **body)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1)
        assert answer.is_success, answer.text
        return answer.json() if answer.content else None

    def deployment(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.request("GET", f"/deployments/name/{name}/{name}")
        return found

    def run(self, name: str, **parameters: Any) -> str:
        """Ask for a run of a deployment now; return the id of the flow run."""
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        return str(self.request("POST", path, json={"parameters": parameters})["id"])

    def finished(self, name: str, **parameters: Any) -> dict[str, Any]:
        """Run a deployment to its end; again where one that was scheduled was in its way."""
        while True:
            flow_run = self.ended(self.run(name, **parameters))
            if "concurrency limit" not in (flow_run["state"]["message"] or ""):
                return flow_run

    def runs(self, **wanted: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.request(
            "POST", "/flow_runs/filter", json={"flow_runs": wanted}
        )
        return found

    def ended(self, flow_run_id: str) -> dict[str, Any]:
        """Wait until a flow run has come to its end; return it."""

        def final() -> dict[str, Any] | None:
            (run,) = self.runs(id={"any_": [flow_run_id]})
            return run if run["state_type"] in FINAL else None

        return wait_until(final, f"flow run {flow_run_id} does not end; see {self.folder}")

    def stop(self) -> None:
        for child in reversed(self._started):
            stop(child, signal.SIGTERM)


def stop(child: subprocess.Popen[bytes], number: int) -> None:
    """Signal a group of processes, and end it for good when it does not listen."""
    if child.poll() is None:
        os.killpg(child.pid, number)
    try:
        child.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def wait_until(ask: Callable[[], Answer | None], complaint: str) -> Answer:
    """Return the first answer that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (answer := ask()):
        assert time.monotonic() < deadline, complaint
        time.sleep(0.2)
    return answer


def children(process_id: int) -> list[int]:
    """Return the ids of the processes that a process started and that still run."""
    paths = Path(f"/proc/{process_id}/task").glob("*/children")
    return [int(child) for path in paths for child in path.read_text().split()]
