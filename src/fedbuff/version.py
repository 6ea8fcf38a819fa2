__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """What a run was made with."""
    import platform

    import numpy as np
    import torch

    return {
        "fedbuff": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": str(torch.__version__),
    }
