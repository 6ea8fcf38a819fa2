from fedbuff.deploy.flower import client_app

app = client_app("settings.toml")
