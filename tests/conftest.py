"""What holds for every test."""

import signal

from hypothesis import settings

# A change is judged by the same examples each time; `make soak` looks for new ones.
settings.register_profile("same", derandomize=True, deadline=None, database=None)
settings.register_profile("search", max_examples=500, deadline=None)
settings.load_profile("same")


def pytest_configure() -> None:
    """Hear Ctrl-C, also when started in the background, where a shell has it ignored.

    Child processes inherit that, and the tests press it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
