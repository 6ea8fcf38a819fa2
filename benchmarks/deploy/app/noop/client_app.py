"""The clients' half, for stock SuperNodes."""

import os

from fedbuff.deploy.flower import client_app

app = client_app(os.environ.get("FEDBUFF_BENCH", "settings.toml"))
