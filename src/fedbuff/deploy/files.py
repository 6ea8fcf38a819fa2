"""The files of a deployment folder that hold no secret, as text: the Flower project, systemd units, compose, the README.

They all start the same processes with the same arguments, those of processes.py.
"""

import getpass
import os
import re
import shlex
import sys
from collections.abc import Iterable
from functools import partial
from importlib import metadata
from pathlib import Path

from fedbuff import toml
from fedbuff.deploy import processes
from fedbuff.version import __version__


def texts(folder: Path, names: list[str]) -> dict[str, str]:
    """The files of the folder that hold no secret, and follow from its address and its gateways."""
    local = processes.local_address(folder)
    return {
        "app/pyproject.toml": _PYPROJECT,
        "app/server_app.py": _SERVER_APP,
        "app/client_app.py": _CLIENT_APP,
        "flwr/config.toml": toml.dumps(
            {
                "superlink": {
                    "default": processes.CONNECTION,
                    processes.CONNECTION: {
                        "address": local,
                        "root-certificates": str(folder / "certificates" / "ca.crt"),
                    },
                }
            }
        ),
        "environment": "".join(f"{name}={shlex.quote(v)}\n" for name, v in processes.variables(folder).items()),
        "README.md": readme(folder, names),
        "compose.yaml": compose(folder, names),
        **{f"systemd/{name}": text for name, text in units(folder).items()},
    }


_PYPROJECT = f"""\
[project]
name = "{processes.APP}"
version = "1.0.0"
description = "FedBuff: asynchronous federated learning with buffered aggregation"
license = "Apache-2.0"
dependencies = ["flwr>=1.41,<2", "fedbuff"]

[tool.flwr.app]
publisher = "fedbuff"

[tool.flwr.app.components]
serverapp = "server_app:app"
clientapp = "client_app:app"
"""

_SERVER_APP = """\
from fedbuff.deploy.flower import server_app

app = server_app("settings.toml")
"""

_CLIENT_APP = """\
from fedbuff.deploy.flower import client_app

app = client_app("settings.toml")
"""


def units(folder: Path) -> dict[str, str]:
    """Unit files for systemd: the SuperLink, the SuperExec, a gateway, and what keeps the run going."""
    keeper = [processes.tool("fedbuff"), "deploy", "run", str(folder)]
    unit = partial(_unit, folder)
    any_gateway = [part.replace("\0", "%i") for part in _escaped(processes.gateway_command(folder, "\0"))]
    return {
        "fedbuff-superlink.service": unit("Flower's SuperLink", _escaped(processes.superlink_command(folder))),
        # ServerApps outlive the SuperExec that has started them
        "fedbuff-superexec.service": unit(
            "starts the ServerApp", _escaped(processes.superexec_command(folder)), "KillMode=process"
        ),
        "fedbuff-gateway@.service": unit("gateway %i", any_gateway),
        "fedbuff-run.service": unit("keeps the run going", _escaped(keeper), restart="on-failure"),
    }


def _unit(folder: Path, what: str, command: list[str], more: str = "", restart: str = "always") -> str:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return "\n".join(
        [
            "[Unit]",
            f"Description=fedbuff: {what}",
            "Wants=network-online.target",
            "After=network-online.target",
            "StartLimitIntervalSec=0",
            "",
            "[Service]",
            f"User={getpass.getuser()}",
            f"WorkingDirectory={_percent(str(folder))}",
            f"EnvironmentFile={_percent(str(folder / 'environment'))}",
            f'Environment="PATH={_percent(path)}"',
            "ExecStart=" + " ".join(command),
            f"Restart={restart}",
            "RestartSec=5",
            *([more] if more else []),
            "UMask=0077",
            "NoNewPrivileges=yes",
            "PrivateTmp=yes",
            "ProtectSystem=strict",
            f'ReadWritePaths="{_percent(str(folder))}"',
            "ProtectKernelTunables=yes",
            "ProtectControlGroups=yes",
            "RestrictSUIDSGID=yes",
            "",
            "[Install]",
            "WantedBy=multi-user.target",
            "",
        ]
    )


def _percent(text: str) -> str:
    return text.replace("%", "%%")


def _escaped(command: list[str]) -> list[str]:
    """A command as systemd reads it."""
    return [
        '"' + _percent(part).replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$") + '"' if _odd(part) else part
        for part in command
    ]


def _odd(part: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_./:@,=+-]+", part) is None


def compose(folder: Path, names: list[str]) -> str:
    """A compose file: all processes on one machine, in its own network, with the folder under its own path."""
    commands = {
        "superlink": processes.superlink_command(folder),
        "superexec": processes.superexec_command(folder),
        **{name: processes.gateway_command(folder, name) for name in names},
        "run": ["fedbuff", "deploy", "run", str(folder)],
    }
    services = "\n".join(
        f"  {name}:\n    <<: *process\n    restart: {'on-failure' if name == 'run' else 'unless-stopped'}\n"
        f"    command: {_inside(command)}"
        for name, command in commands.items()
    )
    there = toml.show(f"{folder}:{folder}".replace("$", "$$"))
    return _COMPOSE.format(
        torch=metadata.version("torch").partition("+")[0],  # first and alone: another one may be fetched with all of CUDA
        version=__version__,
        user=f"{os.getuid()}:{os.getgid()}",
        folder=toml.show(str(folder)),
        volume=there,
        services=services,
    )


def _inside(command: list[str]) -> str:
    """A command in a container: its programs by name. JSON is YAML, and $ would be a variable."""
    first = "python" if command[0] == sys.executable else Path(command[0]).name
    return toml.show([part.replace("$", "$$") for part in (first, *command[1:])])


_COMPOSE = """\
# docker compose up --build; network_mode host, so that only this machine reaches what is not for gateways.
# fedbuff comes from your package index. If it is not there: a wheel beside this file, COPY, and its name below.
x-process: &process
  build:
    context: .
    dockerfile_inline: |
      FROM python:3.12-slim
      RUN pip install --no-cache-dir torch=={torch}
      RUN pip install --no-cache-dir 'fedbuff[flower,demo]=={version}'
  image: fedbuff-deployment
  user: "{user}"
  network_mode: host
  read_only: true
  tmpfs: [/tmp]
  cap_drop: [ALL]
  security_opt: ["no-new-privileges:true"]
  init: true
  env_file: environment
  environment: {{HOME: /tmp}}
  working_dir: {folder}
  volumes: [{volume}]

services:
{services}
"""


def readme(folder: Path, names: list[str]) -> str:
    """What to start, in which order."""
    host, port = processes.address(folder)

    def line(command: list[str]) -> str:
        return shlex.join(["python" if command[0] == sys.executable else Path(command[0]).name, *command[1:]])

    def indented(lines: Iterable[str]) -> str:
        return "\n".join(f"       {text}" for text in lines)

    return _README.format(
        folder=shlex.quote(str(folder)),
        address=processes.joined(host, port),
        superlink=line(processes.superlink_command(folder)),
        superexec=line(processes.superexec_command(folder)),
        register=indented(line(processes.register_command(folder, name)) for name in names),
        gateways=indented(line(processes.gateway_command(folder, name)) + " &" for name in names),
        run=line(processes.run_command(folder)),
        list=line(processes.list_command()),
        bin=shlex.quote(str(Path(sys.executable).parent)),
        instances=" ".join(f"fedbuff-gateway@{name}" for name in names),
    )


_README = """\
# A FedBuff deployment

Made by `fedbuff deploy init`. The SuperLink is at {address}. Everything in here is for its owner only: it holds private keys.

    app/            the Flower project, with settings.toml: what server and gateways train
    certificates/   of the SuperLink; gateways need ca.crt; keep ca.key offline if you can
    gateways/       a folder for each gateway: its key, later its outbox
    superlink/      Flower's database, and the secret that SuperLink and SuperExec share
    flwr/           FLWR_HOME, so that your own ~/.flwr stays as it is
    run/            the run: settings, metrics, checkpoints, journal; summary.json once it is finished
    environment     what the processes find in their environment

Check it at any time, before and while it runs: `fedbuff doctor {folder}`

## By hand

In each terminal first:

    cd {folder}
    export PATH={bin}:$PATH
    set -a; . ./environment; set +a

1. The SuperLink:

       {superlink}

2. The SuperExec, which starts the server (ServerApp) of a run. Beside the SuperLink:

       {superexec}

3. Once, the gateways' keys (step 5 does it for you):

{register}

4. The gateways, once their keys are registered, here or on their own machines. There they need three things, under any path:
   app/settings.toml, certificates/ca.crt, and their own folder of gateways/; and what the task reads, its data or a file of
   your Python code, under the paths in app/settings.toml:

{gateways}

5. The run. This registers keys that are missing, submits the run, submits it again whenever its server was lost, and ends when
   run/summary.json is there:

       fedbuff deploy run {folder}

   To submit it yourself, once: `{run}`
   Which runs there are: `{list}`

## With systemd

    sudo cp systemd/*.service /etc/systemd/system/ && sudo systemctl daemon-reload
    sudo systemctl enable --now fedbuff-superlink fedbuff-superexec
    sudo systemctl enable --now {instances}
    sudo systemctl start fedbuff-run

## With compose

    docker compose up --build

## What may be killed

Anything, at any time, also with kill -9. Start it again: the SuperLink reads its database, a gateway its outbox, and the
server goes on from run/. To Flower, a run that lost its server has failed; `fedbuff deploy run` submits the next one, on the
same folder, a minute later.

A ServerApp outlives the SuperLink: it waits for it. To end everything, stop the run first (flwr stop RUN).

## Who may do what

Gateways sign with their keys; a key that was not registered is turned away. `flwr run` and `flwr supernode register` work on
the SuperLink's own machine only: a door in front of Flower (fedbuff/deploy/superlink.py) sees to it, since Flower itself lets
everybody in who reaches the port. Whoever can log in on that machine can do both.
"""
