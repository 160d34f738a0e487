"""What holds for every test."""

import signal


def pytest_configure() -> None:
    """Hear Ctrl-C, also when started in the background, where a shell has it ignored.

    Child processes inherit that, and the tests press it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
