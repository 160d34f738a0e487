"""Whether a Prefect server answers, asked without importing Prefect."""

START = (
    "start one with `prefect server start`, then name it: "
    "`export PREFECT_API_URL=http://127.0.0.1:4200/api`"
)
TIMEOUT_S = 3.0


class ServerError(RuntimeError):
    """No Prefect server does what it should; the message says what to do."""


def check_server(url: str) -> None:
    """Raise `ServerError` where nothing answers at the URL of a Prefect API."""
    import httpx

    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ServerError(
            f"PREFECT_API_URL = {url} does not answer ({error}): start it with "
            "`prefect server start`, unset the variable (a run then starts a server of its own), "
            "or train with `--orchestrator none`"
        ) from error
