"""`fedbuff deploy …`: a run over a network, from its keys to its end."""

import argparse
import logging
from pathlib import Path
from typing import Any

from fedbuff.deploy import init, status


def parser(commands: Any) -> None:
    """`fedbuff deploy` for the command line's own parser."""
    summary = "FedBuff over a network, on Flower: set it up, run it, watch it."
    kinds = commands.add_parser("deploy", help=summary, description=summary).add_subparsers(required=True, metavar="KIND")
    init.parser(kinds)
    status.parser(kinds)
    summary = "Stand for many clients: connect to a SuperLink, train what the server asks for, report."
    sub: argparse.ArgumentParser = kinds.add_parser("gateway", help=summary, description=summary)
    sub.set_defaults(command=run_gateway)
    sub.add_argument("settings", type=Path, metavar="SETTINGS.toml")
    sub.add_argument("--superlink", required=True, metavar="HOST:PORT")
    sub.add_argument("--clients", metavar="0-49", help="whom it stands for (default: what the settings say of --name)")
    sub.add_argument("--name", metavar="NAME", help="that it is registered under")
    sub.add_argument("--folder", type=Path, required=True, metavar="DIR", help="where its outbox is")
    sub.add_argument("--key", type=Path, metavar="FILE", help="its private key")
    sub.add_argument("--root-certificates", type=Path, metavar="FILE", help="of the SuperLink")
    sub.add_argument("--insecure", action="store_true", help="no TLS and no key: on this machine, for a try")


def run_gateway(args: argparse.Namespace) -> None:
    from fedbuff.deploy.gateway import gateway
    from fedbuff.deploy.settings import Deployment, ranges
    from fedbuff.deploy.worker import work_of
    from fedbuff.settings import from_tables, read
    from fedbuff.toml import SettingsError

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if args.clients is None and args.name is None:
        raise SettingsError("give --clients, e.g. 0-49, or the --name of one of the settings' deploy.gateways")
    if args.clients is None:
        deployment = from_tables(read(args.settings)).deploy or Deployment()
        if args.name not in deployment.gateways:
            raise SettingsError(f"--name {args.name}: {args.settings} has no deploy.gateways of that name; give --clients")
    clients = ranges(args.clients) if args.clients else deployment.clients_of(args.name)
    work = work_of(args.settings, None, 0, clients, args.folder)
    gateway(
        work,
        args.superlink,
        key=args.key,
        root_certificates=args.root_certificates,
        insecure=args.insecure,
        folder=args.folder,
    )
