"""C++ beside our Python: compiled at first use by the machine's own compiler, cached on disk, called by ctypes.

The file in the cache is named by a hash of source, flags, compiler and processor, and moved there when it is complete, so
processes may race for it. Without a compiler, or with FEDBUFF_KERNELS=off, there is a slower way, and we say so once.
"""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_KINDS = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "u": ctypes.c_uint64, "d": ctypes.c_double}


def load(source: Path, flags: Sequence[str], functions: Mapping[str, str], otherwise: str) -> ctypes.CDLL | None:
    """The compiled source, a file or a folder of files, or None, having said on stderr why, and what happens `otherwise`.

    `functions` are its functions: the kinds of the arguments, p(ointer), i(nteger), u(nsigned) or d(ouble), and after an arrow
    that of the result, if any: "pii->i".
    """
    if os.environ.get("FEDBUFF_KERNELS", "").lower() == "off":
        print(f"fedbuff: FEDBUFF_KERNELS=off, so {otherwise}, which is slower", file=sys.stderr)
        return None
    compiler = find_compiler()
    if compiler is None:
        print(f"fedbuff: found no C++ compiler (set $CXX); {otherwise}, which is slower", file=sys.stderr)
        return None
    try:
        loaded = ctypes.CDLL(str(built(source, flags, compiler, cache_folder())))
        for name, kinds in functions.items():
            arguments, _, result = kinds.partition("->")
            function = getattr(loaded, name)
            function.argtypes = [_KINDS[kind] for kind in arguments]
            function.restype = _KINDS[result] if result else None
        return loaded
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        print(f"fedbuff: could not compile {source.name}, {otherwise}: {detail}", file=sys.stderr)
        return None


def find_compiler() -> list[str] | None:
    """$CXX, with arguments if it has some, or the first of the usual names that is there."""
    commands = [shlex.split(os.environ["CXX"])] if os.environ.get("CXX") else [["c++"], ["g++"], ["clang++"]]
    return next(([path, *arguments] for name, *arguments in commands if (path := shutil.which(name))), None)


def cache_folder() -> Path:
    """$FEDBUFF_CACHE, or a folder of our own where caches belong."""
    if own := os.environ.get("FEDBUFF_CACHE"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedbuff"
    except RuntimeError:  # an account without a home
        return Path(tempfile.gettempdir()) / f"fedbuff-{os.getuid()}"


def built(source: Path, flags: Sequence[str], compiler: Sequence[str], folder: Path) -> Path:
    """The shared library in the cache, compiled if it is not there yet, or is not what the compiler left there."""
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    files = sorted([*source.glob("*.cpp"), *source.glob("*.h")]) if source.is_dir() else [source]
    text = [file.read_text(encoding="utf-8") for file in files]
    identity = [text, " ".join(flags), " ".join(compiler), version, platform.machine(), processor_flags()]
    path = folder / f"{source.stem}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}.so"
    checksum = path.resolve().with_suffix(".sha256")
    if (
        path.is_file() and checksum.is_file() and checksum.read_text() == digest(path)
    ):  # a damaged one may kill whoever loads it
        return path
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fedbuff: compiling {source.name} for this machine, once, into {folder} …", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / path.name
        units = [str(file) for file in files if file.suffix == ".cpp"]
        command = [*compiler, *flags, "-shared", "-fPIC", *units, "-o", str(made)]
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        said = made.with_suffix(".sha256")
        said.write_text(digest(made))
        made.replace(path)  # atomic: others see the whole file or none
        said.replace(checksum)
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def processor_flags() -> str:
    """What -march=native depends on; a cache may be shared by different machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
