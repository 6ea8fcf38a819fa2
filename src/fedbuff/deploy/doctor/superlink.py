"""The SuperLink: how it is started, and whether it answers."""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from fedbuff.deploy import processes
from fedbuff.deploy.doctor.finding import Finding


def check_commands(folder: Path) -> Iterator[Finding]:
    """The SuperLink's command: ours, and those that stand in files somebody may have changed."""
    yield from check_command(processes.superlink_command(folder), "by hand")
    unit = folder / "systemd" / "fedbuff-superlink.service"
    if unit.exists():
        line = re.search(r"^ExecStart=(.*)$", unit.read_text(encoding="utf-8"), re.MULTILINE)
        yield from check_command(shlex.split(line[1]) if line else [], "systemd")
    compose = folder / "compose.yaml"
    if compose.exists():
        line = re.search(
            r"^  superlink:\n(?:    .*\n)*?    command: (\[.*\])$", compose.read_text(encoding="utf-8"), re.MULTILINE
        )
        yield from check_command(json.loads(line[1]) if line else [], "compose")


def check_command(command: list[str], where: str) -> Iterator[Finding]:
    """A command that starts a SuperLink: what Flower's defaults would get wrong."""
    about = f"SuperLink ({where})"

    def option(name: str) -> str:
        given = [b for a, b in pairwise(command) if a == name]
        given += [part.split("=", 1)[1] for part in command if part.startswith(f"{name}=")]
        return given[-1] if given else ""

    found: list[Finding] = []
    if "--insecure" in command or not all(option(f"--ssl-{name}") for name in ("certfile", "keyfile", "ca-certfile")):
        change = "no --insecure, but --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile"
        found.append(Finding("error", about, "no TLS: whoever listens reads every update and can pass for a gateway", change))
    if "--enable-supernode-auth" not in command:
        found.append(Finding("error", about, "any gateway may join, without a key", "--enable-supernode-auth"))
    if option("--isolation") != "process":
        change = "--isolation process, and a flower-superexec beside it"
        found.append(Finding("error", about, "the run's server dies with the SuperLink", change))
    database = option("--database")
    if not database or ":memory:" in database or database == ":flwr-in-memory:":
        found.append(Finding("error", about, "a restart forgets keys, runs and messages", "--database FILE, on a disk"))
    if not option("--superexec-auth-secret-file"):
        change = "--superexec-auth-secret-file, here and for the flower-superexec"
        found.append(Finding("warning", about, "whoever reaches it may take over the run's server", change))
    if "fedbuff.deploy.superlink" not in command:
        change = "python -m fedbuff.deploy.superlink instead of flower-superlink, or a firewall"
        found.append(
            Finding("warning", about, "everybody who reaches the port may start code: Flower asks no password", change)
        )
    yield from found or [Finding("ok", about, "TLS, keys, a database on the disk, a process for the server")]


def check_superlink(folder: Path, port: int) -> Iterator[Finding]:
    """Whether it answers, and as itself."""
    import socket
    import ssl

    about, (host, _) = "SuperLink", processes.address(folder)
    try:
        context = ssl.create_default_context(cafile=str(folder / "certificates" / "ca.crt"))
        ours = ssl.PEM_cert_to_DER_cert((folder / "certificates" / "server.crt").read_text(encoding="ascii"))
    except (OSError, ValueError) as e:
        yield Finding("error", about, f"can't ask it: ca.crt or server.crt: {e}", "fedbuff deploy init DIR --force")
        return
    where = processes.joined(host, port)
    try:
        with socket.create_connection((host, port), timeout=5) as plain, context.wrap_socket(plain, server_hostname=host) as s:
            theirs = s.getpeercert(binary_form=True)
            s.sendall(f"GET /health HTTP/1.1\r\nHost: {where}\r\nConnection: close\r\n\r\n".encode())
            answer = s.recv(64).split(b"\r\n")[0].decode("latin-1")
    except ConnectionRefusedError:
        yield Finding("warning", about, f"nothing answers at {where}", "start it, as README.md says")
        return
    except ssl.SSLError as e:
        change = "whose is that port? It does not show the certificate of this folder; restart the SuperLink"
        yield Finding("error", about, f"{where}: {getattr(e, 'verify_message', '') or e.reason or e}", change)
        return
    except OSError as e:
        yield Finding("warning", about, f"{where}: {e}", "start it, as README.md says; open the port in the firewall")
        return
    if theirs != ours:
        yield Finding("warning", about, f"{where} shows an older certificate than server.crt", "restart the SuperLink")
    elif " 200" in answer:
        yield Finding("ok", about, f"{where} answers, with its certificate")
    else:
        yield Finding("error", about, f"{where} answers {answer!r}", "whose is that port? Is it a SuperLink?")
