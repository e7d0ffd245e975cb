"""Other libraries that do something of the kind. Who has not installed one gets its benchmarks skipped, with the reason.

    pip install zeroq pyzmq iceoryx2 flatbuffers loky distributed
    pip install --no-deps --target DIR subetha-ipc && export SUBETHA_IPC=DIR

The second one calls its package `subetha`, as this library does; so it lies in a folder of its own and is loaded as `subetha_ipc`.
"""

import importlib
import importlib.util
import os
import sys

PACKAGES = {"zmq": "pyzmq", "distributed": "distributed", "iceoryx2": "iceoryx2 flatbuffers"}


def needed(module):
    """Import the module of a peer; NotImplementedError, by which asv skips a benchmark, says what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotImplementedError(f"pip install {PACKAGES.get(module, module)} ({error})") from error


def subetha_ipc():
    name = "subetha_ipc"
    if name in sys.modules:
        return sys.modules[name]
    folder = os.environ.get("SUBETHA_IPC")
    if not folder:
        raise NotImplementedError(
            "pip install --no-deps --target DIR subetha-ipc, and give DIR in the environment variable SUBETHA_IPC"
        )
    package = os.path.join(folder, "subetha")
    spec = importlib.util.spec_from_file_location(
        name, os.path.join(package, "__init__.py"), submodule_search_locations=[package]
    )
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
