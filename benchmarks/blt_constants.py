"""Makes src/fedbuff/privacy/constants.py: the buffered linear Toeplitz matrices that `mechanism = "blt"` uses.

    python -m venv blt-env && blt-env/bin/pip install jax-privacy==2.0.0
    blt-env/bin/python benchmarks/blt_constants.py            # minutes per horizon; goes on where it was stopped

jax-privacy optimises the largest prefix-sum error at a fixed sensitivity, for one participation. It is needed here only:
sensitivities are computed anew from the constants when they are used.
"""

import ast
import sys
from pathlib import Path

import jax

jax.config.update("jax_enable_x64", True)

from jax_privacy.matrix_factorization import buffered_toeplitz  # noqa: E402

TABLE = Path(__file__).parents[1] / "src/fedbuff/privacy/constants.py"
HORIZONS = sorted([2**n for n in range(6, 21)] + [660, 66_012])  # the last two: the paper's, and our test vectors'
HEAD = '''"""Horizon -> (decay θ, scale ω) of each buffer, for `blt`; made by benchmarks/blt_constants.py, not by hand.

C is lower triangular and Toeplitz with c_0 = 1 and c_i = Σ_j ω_j θ_j^(i−1): optimised for the largest error of a prefix sum
at this horizon, one participation.
"""

BLT: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
'''


def main() -> None:
    table = known()
    for horizon in [int(a) for a in sys.argv[1:]] or HORIZONS:
        if horizon not in table:
            blt = buffered_toeplitz.optimize(n=horizon, min_sep=1, max_participations=1, error="max").canonicalize()
            table[horizon] = tuple(map(float, blt.buf_decay)), tuple(map(float, blt.output_scale))
            write(table)
            print(horizon, table[horizon], float(buffered_toeplitz.max_loss(blt, n=horizon)), flush=True)


def known() -> dict:
    return ast.literal_eval("{" + TABLE.read_text().split(" = {\n")[1]) if TABLE.exists() else {}


def write(table: dict) -> None:
    rows = [f"    {n}: (\n        {theta},\n        {omega},\n    ),\n" for n, (theta, omega) in sorted(table.items())]
    TABLE.write_text(HEAD + "".join(rows) + "}\n")


if __name__ == "__main__":
    main()
