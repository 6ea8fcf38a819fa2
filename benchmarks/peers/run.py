"""Throughput and memory of federated-learning simulators, ours among them, on one and the same work (work.py).

    python benchmarks/peers/run.py [fedbuff|loop|flsim-async|flsim-sync|pfl|pfl-2|flower|all ...] [--seconds 30] [--json FILE]

For each peer: make its virtual environment (once; about 1 GB each), run its script there as a process of its own, with
as many threads as the peer takes by default, and print a row. A peer that fails says why and the others go on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
TORCH = "torch==2.13.0"  # the same in every environment, and installed first: a peer's own wish may be a CUDA build
FLSIM = ["hydra-core==1.3.*", "omegaconf==2.3.*", "opacus==1.6.*", "tensorboard", "tqdm", "scikit-learn", "pandas"]

# Environment: the pip installs that follow that of PyTorch.
ENVIRONMENTS = {
    "fedbuff": [["--editable", str(HERE.parents[1])]],
    "flsim": [["--no-deps", "flsim==0.1.0"], FLSIM],  # all it imports; not torchvision, which it does not
    "pfl": [["pfl[pytorch]==0.6.0"]],
    "flower": [["flwr[simulation]==1.41.0"]],
}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
# Peer: its environment and what Python runs in it.
PEERS = {
    "fedbuff": ("fedbuff", ["fedbuff_run.py"]),
    "loop": ("pfl", ["work.py"]),
    "flsim-async": ("flsim", ["flsim_run.py", "async"]),
    "flsim-sync": ("flsim", ["flsim_run.py", "sync"]),
    "pfl": ("pfl", ["pfl_run.py"]),
    "pfl-2": ("pfl", [*TORCHRUN, "pfl_run.py"]),
    "flower": ("flower", ["flower_run.py"]),
}


class PeerError(Exception):
    """A peer could not be installed or run."""


def environment(name: str, envs: Path) -> Path:
    """The environment's Python; the environment is made if there is none of these very packages."""
    python, ready = envs / name / "bin" / "python", envs / name / "installed.json"
    wanted = [[TORCH, "numpy"], *ENVIRONMENTS[name]]
    if ready.exists() and json.loads(ready.read_text()) == wanted:
        return python
    print(f"making the environment {name} ...", file=sys.stderr)
    venv.create(envs / name, with_pip=True, clear=True)
    constraints = envs / "constraints.txt"
    constraints.write_text(TORCH + "\n")
    for packages in wanted:
        execute([python, "-m", "pip", "install", "-c", constraints, *packages], envs / f"{name}-install.log", 3600)
    ready.write_text(json.dumps(wanted))
    return python


def execute(command: list[str | Path], log: Path, timeout: float, **env: str) -> str:
    """What the command prints; its complaints go to the log. Its whole process group ends with it."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=HERE, env=os.environ | env, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        try:
            printed, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise PeerError(f"not done after {timeout:.0f} s, see {log}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode:
        lines = [line.strip() for line in log.read_text().splitlines() if line.strip()] or ["no message"]
        raise PeerError(f"exit {process.returncode}: {lines[-1]} (see {log})")
    return printed


def run(peer: str, envs: Path, seconds: float, timeout: float, threads: int | None) -> dict:
    name, script = PEERS[peer]
    command = [environment(name, envs), *script, "--seconds", str(seconds)]
    env = {"PEERS_DATA": str(envs / "data")} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    printed = execute(command, envs / f"{peer}.log", timeout, **env)
    lines = [line for line in printed.splitlines() if line.startswith('{"peer"')]
    if not lines:
        raise PeerError("it ended without a result")
    return json.loads(lines[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", metavar="peer", help=f"{', '.join(PEERS)} or all (the default)")
    parser.add_argument("--seconds", type=float, default=30, help="of training to measure, after the warm-up")
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS; each peer's own default if not given")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds after which a peer is given up")
    parser.add_argument("--envs", type=Path, default=HERE / ".peers", help="folder of the environments, data and logs")
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    if unknown := set(args.peers) - {*PEERS, "all"}:
        parser.error(f"no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    envs = args.envs.resolve()
    envs.mkdir(parents=True, exist_ok=True)

    results = []
    print("| peer | version | trips per second | peak MB | trips | seconds |\n|---|---|---:|---:|---:|---:|", flush=True)
    for peer in PEERS if not args.peers or "all" in args.peers else args.peers:
        try:
            result = run(peer, envs, args.seconds, args.timeout, args.threads)
            cells = (result["version"], f"{result['trips_per_second']:.1f}", f"{result['peak_memory_mb']:,}")
            print("|", " | ".join((peer, *cells, f"{result['trips']:,}", f"{result['seconds']:.1f}")), "|", flush=True)
        except PeerError as error:
            result = {"peer": peer, "error": str(error)}
            print(f"| {peer} | failed: {error} |", flush=True)
        results.append(result)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
