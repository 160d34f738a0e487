"""A user's own functions by name: `module:function`, in the working folder or installed."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rrl_core.tasks.protocol import TaskError


@dataclass(frozen=True)
class Loaded:
    """A function, and the file that defines it."""

    function: Callable[..., Any]
    source: Path


def load_function(what: str, spec: str, known: Collection[str] = ()) -> Loaded:
    """Load the function `module:function`; the module may stand in the working folder.

    The working folder joins the end of `sys.path`, so that it can hide no installed package.

    Args:
        what: what is loaded, for messages: `reward` or `task`.
        spec: the name.
        known: names that could have been meant instead.

    Raises:
        TaskError: the spec, the module or the function is not as expected.
    """
    module_name, colon, function_name = spec.partition(":")
    if not (module_name and colon and function_name):
        others = f" or one of {', '.join(known)}" if known else ""
        raise TaskError(f"{what}: expected `module:function`{others}; came `{spec}`")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise TaskError(
            f"{what} `{spec}`: importing `{module_name}` raised {type(error).__name__}: {error}; "
            f"put `{module_name}.py` into {os.getcwd()} or install it"
        ) from error
    source = inspect.getsourcefile(module)
    function = getattr(module, function_name, None)
    if source is None or not callable(function):
        raise TaskError(
            f"{what} `{spec}`: expected a function `{function_name}` in a Python file; "
            f"`{module_name}` ({getattr(module, '__file__', 'built in')}) has none"
        )
    return Loaded(function, Path(source))
