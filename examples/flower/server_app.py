from fedbuff.deploy.flower import server_app

app = server_app("settings.toml")
