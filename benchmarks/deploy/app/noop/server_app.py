"""The server's half; its settings are where FEDBUFF_BENCH says."""

import os

from fedbuff.deploy.flower import server_app

app = server_app(os.environ.get("FEDBUFF_BENCH", "settings.toml"))
