"""Compiles the simulated device by one call of g++ for each source: seconds, no ninja, no network.

Into a folder that the test session owns, so that nothing stale is ever found, and workers can't meet there.
"""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++20", "-O1", "-fPIC")
LIMIT_S = 600


def missing() -> str | None:
    """Why the device can't be compiled here; None when it can."""
    if sys.platform != "linux":
        return "the simulated device was only ever compiled on Linux"
    if shutil.which("g++") is None:
        return "the simulated device needs g++, and none is on the PATH: install it"
    if not (_torch() / "include" / "ATen").is_dir():
        return f"the simulated device needs torch's headers, and {_torch()} has none"
    return None


def build(folder: Path) -> Path:
    """Compile into `folder`, and return the library. Raises RuntimeError with the compiler's words."""
    library = folder / "late_device.so"
    sources = sorted(SOURCES.glob("*.cpp"))
    objects = [folder / f"{source.stem}.o" for source in sources]
    compilers = [
        _run("-c", *FLAGS, "-isystem", str(_torch() / "include"), str(source), "-o", str(made))
        for source, made in zip(sources, objects, strict=True)
    ]
    for compiler in compilers:
        _finish(compiler)
    libraries = ("-L", str(_torch() / "lib"), "-ltorch_cpu", "-lc10")
    _finish(_run("-shared", *map(str, objects), *libraries, "-o", str(library)))
    return library


def _torch() -> Path:
    """Where torch is installed; found without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _run(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(["g++", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _finish(compiler: "subprocess.Popen[str]") -> None:
    try:
        said, _ = compiler.communicate(timeout=LIMIT_S)
    finally:
        compiler.kill()
    if compiler.returncode != 0:
        raise RuntimeError(f"{compiler.args} ended with {compiler.returncode}:\n{said}")
