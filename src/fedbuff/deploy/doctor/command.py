"""`fedbuff doctor`: all checks, one after another."""

import argparse
import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedbuff.deploy import processes
from fedbuff.deploy.doctor.certificates import check_certificates
from fedbuff.deploy.doctor.environment import check_environment, check_flower, flower_version
from fedbuff.deploy.doctor.finding import Finding
from fedbuff.deploy.doctor.folder import check_connection, check_host, check_modes, check_place, check_project
from fedbuff.deploy.doctor.keys import check_keys
from fedbuff.deploy.doctor.settings import check_settings
from fedbuff.deploy.doctor.superlink import check_commands, check_superlink


def parser(commands: Any) -> None:
    """`fedbuff doctor` for the command line's own parser."""
    summary = "Check a deployment folder: settings, certificates, keys, Flower, and the SuperLink if it runs."
    sub: argparse.ArgumentParser = commands.add_parser("doctor", help=summary, description=summary)
    sub.set_defaults(command=run_doctor)
    sub.add_argument("folder", type=Path, metavar="DIR", help="that `fedbuff deploy init` wrote")
    sub.add_argument("--json", action="store_true", help="print the findings as JSON")


def run_doctor(args: argparse.Namespace) -> None:
    findings = examine(args.folder.resolve(), os.environ)
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(finding)
    if any(finding.level == "error" for finding in findings):
        raise SystemExit(1)


def examine(folder: Path, environ: Mapping[str, str]) -> list[Finding]:
    """All findings. Raises if this is no deployment folder."""
    host, port = processes.address(folder)
    found = [*check_flower(flower_version()), *check_environment(folder, environ)]
    found += [*check_modes(folder), *check_certificates(folder, host, datetime.datetime.now(datetime.UTC))]
    found += [*check_project(folder), *check_connection(folder), *check_commands(folder)]
    found += [*check_place(folder), *check_host(host)]
    found += [*check_settings(folder), *check_keys(folder), *check_superlink(folder, port)]
    return found
