"""The gateways' keys."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from fedbuff.deploy import processes
from fedbuff.deploy.doctor.finding import Finding
from fedbuff.toml import SettingsError


def check_keys(folder: Path) -> Iterator[Finding]:
    """A key pair for each gateway, each another one, and known to the SuperLink."""
    try:
        from cryptography.hazmat.primitives.serialization import load_ssh_public_key

        from fedbuff.deploy.gateway import private_key
        from fedbuff.deploy.keep import missing_keys
    except ImportError as e:
        yield Finding("error", "keys", f"{e.name} is not installed", "pip install 'fedbuff[flower]'")
        return
    about, again = "keys", "fedbuff deploy init DIR --force makes keys that are missing"
    try:
        names = list(processes.gateways(folder))
    except SettingsError as e:
        yield Finding("error", about, str(e), "correct it in app/settings.toml")
        return
    seen: dict[bytes, str] = {}
    good = True
    for name in names:
        where = folder / "gateways" / name
        try:
            _, public = private_key(where / "key")
            written = load_ssh_public_key((where / "key.pub").read_bytes())
        except (OSError, ValueError) as e:
            good = False
            yield Finding("error", about, f"gateways/{name}: {' '.join(str(e).split())}", again)
            continue
        if written != public:
            good = False
            yield Finding("error", about, f"gateways/{name}: key.pub is not of key", f"remove both; {again}")
        other = seen.setdefault((where / "key.pub").read_bytes().split()[1], name)
        if other != name:
            good = False
            yield Finding("error", about, f"{name} has the key of {other}", f"remove gateways/{name}/key*; {again}")
    if not good:
        return
    missing = missing_keys(folder)
    if missing is None:
        yield Finding("ok", about, f"{len(names)} pairs; not registered yet, `fedbuff deploy run` does it")
    elif missing:
        change = "fedbuff deploy run DIR registers them, or: " + shlex.join(processes.register_command(folder, missing[0]))
        yield Finding("warning", about, f"{', '.join(missing[:5])}{' …' if missing[5:] else ''}: not registered", change)
    else:
        yield Finding("ok", about, f"{len(names)} pairs, all registered")
