"""Flower's SuperLink with a door: other machines reach what gateways need, and nothing else.

    python -m fedbuff.deploy.superlink …      # the arguments of `flower-superlink`

One port serves three interfaces. Gateways use /v1/fleet/, and sign with their keys. /v1/control/ registers keys and starts
runs, that is, code; /v1/runtime/ is what a ServerApp uses. Without Flower's paid edition nobody has to sign in to /v1/control/,
so whoever reaches the port could run code on the server. Behind this door only processes on the SuperLink's own machine can.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedbuff.report.address import is_loopback

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]
_OPEN = ("/v1/fleet/", "/health")


class Door:
    """Middleware that answers 403 to requests from elsewhere, but for those of gateways."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or allowed((scope.get("client") or ("",))[0], scope["path"]):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"only from the SuperLink's own machine\n"})
        else:
            await send({"type": "websocket.close", "code": 1008})


def allowed(peer: str, path: str) -> bool:
    """Whether a request passes.

    >>> allowed("192.0.2.7", "/v1/fleet/pull-messages"), allowed("192.0.2.7", "/v1/control/start-run")
    (True, False)
    >>> allowed("127.0.0.1", "/v1/control/start-run")
    True
    """
    return is_loopback(peer) or path.startswith(_OPEN)


def start() -> None:
    from flwr.superlink import extensions, main
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    if getattr(main, "extensions", None) is not extensions or not hasattr(extensions, "get_middleware"):
        raise SystemExit(
            "fedbuff: this version of Flower has no place for the door: use flwr 1.41, or fedbuff's newest version"
        )
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Door), *others())
    flower_superlink()


if __name__ == "__main__":
    start()
